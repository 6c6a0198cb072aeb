// Prints the rows of bench_collectives as a table, as aims and as JSON.
#pragma once

#include <string>
#include <vector>

#include "conductor.h"

namespace lockstep::bench {

std::string show_bytes(std::int64_t bytes);  // 25 MiB

// One line per row of a cell: the times, and comparisons with the other rows.
std::string table_head();
std::string table_lines(const std::vector<Row>& cell);
// Compares the rows with the aims; counts the aims whose rows are missing.
std::string aims(const std::vector<Row>& rows, int cores);

void write_json(const std::string& path, const std::vector<Row>& rows);
std::vector<Row> read_json(const std::string& path);

}  // namespace lockstep::bench
