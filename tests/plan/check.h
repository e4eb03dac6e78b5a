// What must hold of every plan, checked against the page tables themselves.
#pragma once

#include <string>

#include "headwater/plan.h"
#include "reference/rng.h"
#include "reference/tables.h"

namespace headwater::plan_test {

/// Everything that is wrong with a plan of `batch`, or "": each row's items hold each key that the row sees exactly
/// once, on the page of the row's own table; unmasked ranges are seen by all rows; partial slots belong to one row each
/// and are merged in ascending position; a row is direct, merged or empty. In batch-invariant mode: states are closed
/// only at multiples of the chunk, at the end of the sinks, or where the row's keys begin and end.
std::string complaint(const Plan& plan, const Batch& batch);

/// Options drawn at random: masks, sinks, thresholds, batch-invariant mode.
PlanOptions random_options(reference::Rng& rng);

/// A model of small tiles and chunks under which sharing always pays.
DeviceModel eager_model(int max_tile_rows = 16);

/// A batch drawn at random; `windows`: tables that start late and hold stale ids.
reference::PageTables random_tables(reference::Rng& rng, const PlanOptions& options);

}  // namespace headwater::plan_test
