// Everything of the C++ interface.
#pragma once

#include "headwater/batch.h"
#include "headwater/cpu.h"
#include "headwater/device_model.h"
#include "headwater/error.h"
#include "headwater/executor.h"
#include "headwater/options.h"
#include "headwater/page_pool.h"
#include "headwater/plan.h"
#include "headwater/prefix_cache.h"
#include "headwater/types.h"
#include "headwater/version.h"
#include "headwater/view.h"
