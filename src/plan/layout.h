// Reading the caller's tables into the planner's own, and where each table's page ids lie in PlanData::page_ids.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/memory.h"

namespace headwater::detail {

/// Places kept for a table of `num_pages` ids: a pure function of the length, with room to grow.
[[nodiscard]] std::int32_t region_size(std::int32_t num_pages) noexcept;

/// Tables of a checked batch in page-table form, with their regions. Throws Error (unsupported) where there are too
/// many ids. Returns the size of all regions.
std::int32_t read_tables(const Batch& batch, std::vector<Table>& tables);

/// Copies all ids into regions; unused places hold -1. Refuses ids out of range among the pages of `unchecked`, which
/// are in order of request: at the table's turn, so that ids come from memory once.
void copy_page_ids(const Batch& batch, const std::vector<Table>& tables, std::span<const Entry> unchecked,
                   std::int32_t total, std::vector<std::int32_t>& page_ids);

/// Copies the ids of one table; unused places of its region hold -1.
void copy_table(const PageTable& kv, std::size_t i, const Table& table, std::int32_t* page_ids);

/// The same for explicit levels: tables are nodes, level after level; makes rows, entries and the given forest too.
void read_levels(const Batch& batch, const PlanOptions& options, PlanData& plan);

}  // namespace headwater::detail
