// `lockstep doctor`: checks this machine and prints the findings as a table or as JSON.
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <sstream>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/base/text.h>
#include <lockstep/os/host.h>
#include <lockstep/version.h>

#include "doctor_rows.h"
#include "verbs.h"

namespace lockstep::cli {
namespace {

using Json = nlohmann::ordered_json;

struct DoctorPlan {
  int ranks = 0;
  std::vector<std::string> backends;
  std::vector<int> hosts;
  bool json = false;
};

const char* word_of(Verdict verdict) {
  return verdict == Verdict::ok ? "ok" : verdict == Verdict::note ? "note" : "bad";
}

// Splits text into lines of at most `width`. A longer word, such as a path, continues on the next line.
std::vector<std::string> wrapped(const std::string& text, std::size_t width) {
  std::vector<std::string> lines(1);
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    if (!lines.back().empty() && lines.back().size() + 1 + word.size() > width) lines.emplace_back();
    if (!lines.back().empty()) lines.back() += ' ';
    while (word.size() > width) {
      const auto slash = word.rfind('/', width - 1);
      const auto cut = slash == std::string::npos || slash == 0 ? width : slash + 1;
      lines.back() += word.substr(0, cut);
      lines.emplace_back();
      word.erase(0, cut);
    }
    lines.back() += word;
  }
  return lines;
}

// Prints each row as soon as it is found, because measuring takes seconds.
class Table {
 public:
  void show(const Row& row) const {
    const auto name = row.name.starts_with(kTransport) ? row.name.substr(kTransport.size()) : row.name;
    const auto left = head(row.verdict) + fmt::format("{:<{}}", name, kNameWidth);
    if (const auto figures = figures_of(row.values); !figures.empty()) {
      std::cout << left << figures << '\n';
    } else {
      indented(left, row.finding);
    }
    if (!row.hint.empty()) indented(std::string(kIndent, ' '), "-> " + row.hint);
    std::cout.flush();
  }

  void show_heads_of_figures(int ranks) const {
    std::cout << fmt::format("\n{}: barrier, and all_reduce by tensor size; medians\n",
                             detail::counted(ranks, "rank"));
    for (const bool units : {false, true}) {
      std::cout << std::string(kIndent, ' ');
      for (const auto& column : kColumns)
        std::cout << fmt::format("{:>{}}", units ? column.unit : column.head, kColumnWidth);
      std::cout << '\n';
    }
  }

 private:
  struct Column {
    const char *key, *copy_key, *head, *unit;
  };
  static constexpr std::array<Column, 5> kColumns = {
      {{"barrier_us", "", "barrier", "us"},
       {"all_reduce_4B_us", "", "4 B", "us"},
       {"all_reduce_4KiB_us", "", "4 KiB", "us"},
       {"all_reduce_1MiB_GBps", "1MiB_GBps", "1 MiB", "GB/s"},
       {"all_reduce_25MiB_GBps", "25MiB_GBps", "25 MiB", "GB/s"}}};
  static constexpr std::string_view kTransport = "transport ";
  static constexpr int kNameWidth = 15, kIndent = 6 + kNameWidth, kColumnWidth = 9;

  static bool coloured() {
    return ::isatty(STDOUT_FILENO) == 1 && !env::text("NO_COLOR") &&
           env::text("TERM").value_or("dumb") != "dumb";
  }

  static std::size_t line_width() {
    winsize size{};
    if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
    return std::clamp<std::size_t>(size.ws_col, 60, 120);
  }

  std::string head(Verdict verdict) const {
    const std::string word = word_of(verdict), gap(6 - word.size(), ' ');
    if (!colour_) return word + gap;
    const char* code = verdict == Verdict::ok ? "32" : verdict == Verdict::note ? "33" : "1;31";
    return fmt::format("\033[{}m{}\033[0m{}", code, word, gap);
  }

  static std::string figures_of(const Json& values) {
    std::string text;
    for (const auto& column : kColumns) {
      const auto* key = values.contains(column.key) ? column.key : column.copy_key;
      const double value = values.value(key, 0.0);
      const int digits = value >= 1000 ? 0 : std::string_view(column.unit) == "us" ? 1 : 2;
      text += values.contains(key) ? fmt::format("{:>{}.{}f}", value, kColumnWidth, digits)
                                   : std::string(kColumnWidth, ' ');
    }
    return text.find_first_not_of(' ') == std::string::npos ? "" : text;
  }

  void indented(const std::string& left, const std::string& text) const {
    std::string before = left;
    for (const auto& line : wrapped(text, width_ - kIndent)) {
      std::cout << before << line << '\n';
      before = std::string(kIndent, ' ');
    }
  }

  const bool colour_ = coloured();
  const std::size_t width_ = line_width();
};

class Doctor {
 public:
  explicit Doctor(const DoctorPlan& plan) : plan_(plan) {}

  int examine() {
    if (!plan_.json) std::cout << fmt::format("lockstep {} on {}\n\n", kVersion, host::name()) << std::flush;
    Installed installed;
    std::error_code error;
    installed.program = std::filesystem::read_symlink("/proc/self/exe", error);
    if (error) take({proc_row(error)});
    take(host_rows(plan_.ranks));
    take(limit_rows(plan_.ranks));
    take(network_rows());
    take(software_rows(installed));
    take(sum_rows(plan_.ranks, plan_.hosts));
    if (plan_.ranks > 0) {
      if (!plan_.json) table_.show_heads_of_figures(plan_.ranks);
      const bool chosen = !plan_.backends.empty();
      for (const auto& transport : chosen ? plan_.backends : transport_names())
        take(transport_rows(transport, plan_.ranks, chosen, installed));
      take({memory_copy_row()});
    }
    plan_.json ? print_json() : print_summary();
    return count(Verdict::bad) == 0 ? 0 : 1;
  }

 private:
  static Row proc_row(const std::error_code& error) {
    return {"/proc", fmt::format("cannot be read: {}; checks below will be incomplete", error.message()),
            Verdict::bad, "mount -t proc proc /proc; lockstep run needs it too"};
  }

  void take(const Rows& rows) {
    for (const Row& row : rows) {
      if (!plan_.json) table_.show(row);
      rows_.push_back(row);
    }
  }

  std::ptrdiff_t count(Verdict verdict) const {
    return std::count_if(rows_.begin(), rows_.end(), [&](const Row& row) { return row.verdict == verdict; });
  }

  void print_summary() const {
    const auto bad = count(Verdict::bad), notes = count(Verdict::note);
    std::cout << fmt::format("\n{} bad, {}\n", bad == 0 ? "nothing" : std::to_string(bad),
                             detail::counted(notes, "note"));
  }

  void print_json() const {
    Json report = {{"lockstep", kVersion},       {"host", host::name()},          {"ranks", plan_.ranks},
                   {"bad", count(Verdict::bad)}, {"notes", count(Verdict::note)}, {"rows", Json::array()}};
    for (const Row& row : rows_)
      report["rows"].push_back({{"name", row.name},
                                {"finding", row.finding},
                                {"verdict", word_of(row.verdict)},
                                {"hint", row.hint},
                                {"values", row.values}});
    // Names and the output of other programs may not be UTF-8.
    std::cout << report.dump(2, ' ', false, Json::error_handler_t::replace) << '\n';
  }

  const DoctorPlan& plan_;
  Table table_;
  Rows rows_;
};

}  // namespace

void add_doctor(CLI::App& app, Action& action) {
  auto plan = std::make_shared<DoctorPlan>();
  auto* doctor =
      app.add_subcommand("doctor", "Check this machine for problems; with -n, benchmark each transport");
  doctor->footer(
      "Example: lockstep doctor -n 4 --backend gloo,mpi\n"
      "Every row has a verdict: ok, note (it may matter) or bad (runs will be slow or fail), and a hint if\n"
      "there is a remedy. The exit status is 1 if any row is bad, else 0.");
  auto* ranks = doctor->add_option("-n,--nproc", plan->ranks, "Benchmark each transport with K ranks")
                    ->option_text("K")
                    ->check(CLI::Range(1, 4096));
  doctor
      ->add_option("--backend", plan->backends,
                   fmt::format("Transports to benchmark: {} (default: all available)",
                               fmt::join(transport_names(), ",")))
      ->option_text("LIST")
      ->delimiter(',')
      ->needs(ranks);
  doctor
      ->add_option("--hosts", plan->hosts,
                   "Show the order of sums of a job with these numbers of ranks per host, such as 4,4")
      ->option_text("LIST")
      ->delimiter(',')
      ->check(CLI::Range(1, 4096));
  doctor->add_flag("--json", plan->json, "Print JSON instead of a table");
  doctor->callback([&action, plan] {
    const auto& known = transport_names();
    for (const auto& name : plan->backends)
      if (std::find(known.begin(), known.end(), name) == known.end())
        throw detail::bad_value("--backend", fmt::format("a list of {}", fmt::join(known, ", ")), name);
    action = [plan] { return Doctor(*plan).examine(); };
  });
}

}  // namespace lockstep::cli
