// Cost of an optimizer step: Lockstep's, LibTorch's and Python's, in turns in one run, on one thread. Models:
// "seed", Linear 10 to 1, 11 parameters in 2 tensors; "mlp", 1024-2048-2048-2048-10, 10.5M parameters in 8
// tensors. The lower bound is a memcpy of as many bytes as the update reads and writes.
//
// Freed memory is kept by all contestants (M_MMAP_THRESHOLD), and denormals are flushed.
#include <malloc.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <functional>
#include <iostream>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>

namespace {

using torch::optim::Optimizer;

// A child process that runs one measurement per request.
class Python {
 public:
  Python() {
    int to[2], from[2];
    if (::pipe(to) != 0 || ::pipe(from) != 0) throw std::runtime_error("cannot create a pipe");
    child_ = ::fork();
    if (child_ == 0) {
      ::dup2(to[0], 0);
      ::dup2(from[1], 1);
      for (int each : {to[0], to[1], from[0], from[1]}) ::close(each);
      ::setenv("MALLOC_MMAP_THRESHOLD_", "1073741824", 1);
      ::setenv("MALLOC_TRIM_THRESHOLD_", "4294967296", 1);
      ::setenv("OMP_NUM_THREADS", "1", 1);
      ::execl(PYTHON, PYTHON, "-B", PEER, static_cast<char*>(nullptr));
      ::_exit(127);
    }
    ::close(to[0]);
    ::close(from[1]);
    asks_ = ::fdopen(to[1], "w");
    answers_ = ::fdopen(from[0], "r");
  }
  ~Python() {
    std::fclose(asks_);
    std::fclose(answers_);
    ::waitpid(child_, nullptr, 0);
  }
  Python(const Python&) = delete;
  Python& operator=(const Python&) = delete;

  double ask(const std::string& model, const std::string& kind, int steps) {
    std::fprintf(asks_, "%s %s %d\n", model.c_str(), kind.c_str(), steps);
    std::fflush(asks_);
    double nanoseconds = 0;
    if (std::fscanf(answers_, "%lf", &nanoseconds) != 1)
      throw std::runtime_error("the Python process exited");
    return nanoseconds;
  }

 private:
  pid_t child_;
  std::FILE *asks_, *answers_;
};

double measured(int steps, const std::function<void()>& step) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < steps; ++i) step();
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count() / steps;
}

struct Model {
  torch::nn::Sequential net;
  std::unique_ptr<Optimizer> optimizer;
};

std::vector<std::int64_t> sizes_of(const std::string& model) {
  if (model == "seed") return {10, 1};
  return {1024, 2048, 2048, 2048, 10};
}

template <typename Make>
std::shared_ptr<Model> made(const std::string& model, Make make) {
  auto result = std::make_shared<Model>();
  const auto sizes = sizes_of(model);
  for (std::size_t i = 0; i + 1 < sizes.size(); ++i)
    result->net->push_back(torch::nn::Linear(sizes[i], sizes[i + 1]));
  for (auto& p : result->net->parameters()) p.mutable_grad() = torch::randn_like(p) * 0.01;
  result->optimizer = make(result->net->parameters());
  return result;
}

struct Contestant {
  std::string optimizer, who;
  std::function<double(int steps)> measure;
  std::vector<double> times = {};
};

std::vector<Contestant> contestants(const std::string& model, Python* python) {
  std::vector<Contestant> all;
  auto add = [&](const char* optimizer, const char* who, auto make) {
    auto own = made(model, make);
    all.push_back(
        {optimizer, who, [own](int steps) { return measured(steps, [&] { own->optimizer->step(); }); }});
  };
  auto add_python = [&](const char* optimizer, const char* who, const char* kind) {
    if (python != nullptr)
      all.push_back({optimizer, who, [=](int steps) { return python->ask(model, kind, steps); }});
  };
  using Parameters = std::vector<torch::Tensor>;
  using lockstep::Implementation;
  auto adam = [](Implementation implementation) {
    return [=](const Parameters& p) {
      return std::make_unique<lockstep::Adam>(
          p, lockstep::AdamOptions{.lr = 1e-4, .implementation = implementation});
    };
  };
  auto sgd = [](Implementation implementation) {
    return [=](const Parameters& p) {
      return std::make_unique<lockstep::SGD>(
          p, lockstep::SGDOptions{.lr = 1e-4, .implementation = implementation});
    };
  };
  add("Adam", "lockstep single", adam(Implementation::single));
  add("Adam", "lockstep fused", adam(Implementation::fused));
  add("Adam", "torch::optim", [](const Parameters& p) {
    return std::make_unique<torch::optim::Adam>(p, torch::optim::AdamOptions(1e-4));
  });
  add_python("Adam", "Python", "Adam");
  add_python("Adam", "Python fused", "Adam-fused");
  add("SGD", "lockstep single", sgd(Implementation::single));
  add("SGD", "lockstep fused", sgd(Implementation::fused));
  add("SGD", "torch::optim", [](const Parameters& p) {
    return std::make_unique<torch::optim::SGD>(p, torch::optim::SGDOptions(1e-4));
  });
  add_python("SGD", "Python", "SGD");
  add_python("SGD", "Python fused", "SGD-fused");
  // Adam reads 4 rows and writes 3; a copy of 3.5 rows moves as many bytes. SGD reads 2 and writes 1.
  const auto numbers = made(model, adam(Implementation::single))->net->parameters();
  std::int64_t count = 0;
  for (const auto& p : numbers) count += p.numel();
  for (const auto& [optimizer, rows] : {std::pair("Adam", 3.5), std::pair("SGD", 1.5)}) {
    const auto bytes = static_cast<std::size_t>(rows * 4 * static_cast<double>(count));
    auto from = std::make_shared<std::vector<char>>(bytes, '\1'),
         to = std::make_shared<std::vector<char>>(bytes);
    all.push_back({optimizer, "memcpy", [=](int steps) {
                     return measured(steps, [&] {
                       std::memcpy(to->data(), from->data(), bytes);
                       asm volatile("" ::: "memory");
                     });
                   }});
  }
  return all;
}

double quantile(std::vector<double> values, double part) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(part * static_cast<double>(values.size() - 1))];
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Measure the cost of an optimizer step"};
  int rounds = 15;
  std::string json_file;
  std::vector<std::string> models = {"seed", "mlp"};
  bool without_python = std::string(PYTHON).empty();
  app.add_option("--rounds", rounds, "Number of measurements of each contestant")->check(CLI::PositiveNumber);
  app.add_option("--models", models, "Models: seed, mlp")
      ->delimiter(',')
      ->check(CLI::IsMember({"seed", "mlp"}));
  app.add_option("--json", json_file,
                 "Write rows {model, optimizer, who, ns_median, ns_p10, ns_p90} to this file");
  app.add_flag("--without-python", without_python);
  CLI11_PARSE(app, argc, argv);

  ::mallopt(M_MMAP_THRESHOLD, 1 << 30);
  ::mallopt(M_TRIM_THRESHOLD, -1);
  at::set_num_threads(1);
  at::globalContext().setFlushDenormal(true);
  std::signal(SIGPIPE, SIG_IGN);
  std::unique_ptr<Python> python;
  if (!without_python) python = std::make_unique<Python>();

  auto rows = nlohmann::json::array();
  for (const auto& model : models) {
    auto all = contestants(model, python.get());
    const int steps = model == "seed" ? 2000 : 3;
    for (auto& each : all) each.measure(std::max(steps / 10, 1));
    for (int round = 0; round < rounds; ++round)
      for (auto& each : all) each.times.push_back(each.measure(steps));
    for (const char* optimizer : {"Adam", "SGD"}) {
      std::printf(
          "%s, %s: microseconds per step (10th and 90th percentile of %d rounds), relative to lockstep "
          "single\n",
          model.c_str(), optimizer, rounds);
      double base = 0;
      for (const auto& each : all) {
        if (each.optimizer != optimizer) continue;
        const double median = quantile(each.times, 0.5);
        if (base == 0) base = median;
        std::printf("  %-16s %12.2f  (%.2f to %.2f)  %6.2fx\n", each.who.c_str(), median / 1e3,
                    quantile(each.times, 0.1) / 1e3, quantile(each.times, 0.9) / 1e3, median / base);
        rows.push_back({{"model", model},
                        {"optimizer", optimizer},
                        {"who", each.who},
                        {"ns_median", median},
                        {"ns_p10", quantile(each.times, 0.1)},
                        {"ns_p90", quantile(each.times, 0.9)}});
      }
    }
  }
  if (!json_file.empty()) std::ofstream(json_file) << rows.dump(1) << "\n";
}
