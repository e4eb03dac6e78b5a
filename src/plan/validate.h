// Checks of everything a plan is made from. A message names the argument, the place, what was expected and what was
// found.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "headwater/batch.h"
#include "headwater/device_model.h"
#include "headwater/options.h"

namespace headwater::detail {

void check_model(const DeviceModel& model);
void check_shape(const AttentionShape& shape);
void check_options(const PlanOptions& options);

/// Lengths, offsets and sizes of a batch, all but the page ids. Linear in the number of requests.
void check_batch(const Batch& batch, const PlanOptions& options);

/// Ids of entries [begin, end) of a table's indices: each in [0, num_pages). `name` prefixes the argument.
void check_page_ids(const PageTable& table, std::int64_t begin, std::int64_t end, const std::string& name);

}  // namespace headwater::detail
