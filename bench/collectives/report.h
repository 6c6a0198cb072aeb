// What bench_collectives says of its rows.
#pragma once

#include <string>
#include <vector>

#include "conductor.h"

namespace lockstep::bench {

std::string show_bytes(std::int64_t bytes);  // 25 MiB

// One line for each row of a cell: the times, and how the others compare.
std::string table_head();
std::string table_lines(const std::vector<Row>& cell);
// What was aimed at, and what came of it; only aims whose rows are there, and a word about the rest.
std::string aims(const std::vector<Row>& rows, int cores);

void write_json(const std::string& path, const std::vector<Row>& rows);
std::vector<Row> read_json(const std::string& path);

}  // namespace lockstep::bench
