// Answers data_test.py: reads one case per line from standard input and prints a line of numbers for each.
#include <algorithm>
#include <iostream>
#include <map>
#include <sstream>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include "cmake/multicall.h"

namespace lockstep::testing::data_probe {
using namespace lockstep;

namespace {

using Numbers = std::vector<std::int64_t>;

// The "key=value ..." fields of a line.
class Case {
 public:
  explicit Case(const std::string& line) {
    std::istringstream in(line);
    in >> kind;
    for (std::string word; in >> word;)
      values_[word.substr(0, word.find('='))] = word.substr(word.find('=') + 1);
  }
  std::string text(const std::string& key) const { return values_.at(key); }
  std::int64_t number(const std::string& key) const { return std::stoll(values_.at(key)); }
  bool flag(const std::string& key) const { return number(key) != 0; }
  template <typename T>
  std::vector<T> list(const std::string& key) const {
    std::vector<T> found;
    std::istringstream in(values_.at(key));
    for (std::string part; std::getline(in, part, ',');) found.push_back(static_cast<T>(std::stod(part)));
    return found;
  }
  // key=-1: no generator.
  std::optional<at::Generator> generator(const std::string& key) const {
    if (number(key) < 0) return std::nullopt;
    return at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(number(key)));
  }
  std::string kind;

 private:
  std::map<std::string, std::string> values_;
};

void append_draws(Numbers& out, const std::optional<at::Generator>& generator) {
  for (int i = 0; i < 3; ++i)
    out.push_back(at::randint(1 << 30, {1}, generator, at::kLong).item<std::int64_t>());
}

void append_pass(Numbers& out, Sampler& sampler, std::size_t batch) {
  const auto pass = sampler.pass();
  Numbers some(batch);
  for (std::size_t count = batch; count == batch;) {
    count = pass->next(some);
    out.insert(out.end(), some.begin(), some.begin() + static_cast<std::ptrdiff_t>(count));
  }
}

Numbers sampled(Sampler& sampler, const Case& c, const std::optional<at::Generator>& generator) {
  Numbers out;
  for (int pass = 0; pass < 2; ++pass) append_pass(out, sampler, static_cast<std::size_t>(c.number("batch")));
  append_draws(out, std::nullopt);
  if (generator) append_draws(out, generator);
  return out;
}

// The size and the samples of each batch.
template <typename Loader>
void append_batches(Numbers& out, Loader& loader, std::int64_t most) {
  for (auto& [x, y] : loader) {
    out.push_back(x.size(0));
    for (std::int64_t i = 0; i < x.size(0); ++i) {
      out.push_back(y[i].template item<std::int64_t>());
      if (x[i][1].template item<float>() != static_cast<float>(out.back()))
        throw Error("x and y are not of one sample");
    }
    if (--most == 0) break;
  }
}

Numbers loaded(const Case& c) {
  const auto size = c.number("size");
  const auto y = at::arange(size, at::kLong);
  TensorDataset dataset(at::stack({y, y}, 1).to(at::kFloat), y);
  const auto generator = c.generator("generator");
  const DataLoaderOptions options{.batch_size = c.number("batch"),
                                  .shuffle = c.flag("shuffle"),
                                  .drop_last = c.flag("drop_last"),
                                  .num_workers = static_cast<int>(c.number("workers")),
                                  .generator = generator};
  DataLoader loader(dataset, options);
  Numbers out = {static_cast<std::int64_t>(loader.size())};
  for (const auto most : c.list<std::int64_t>("passes")) append_batches(out, loader, most);
  append_draws(out, std::nullopt);
  if (generator) append_draws(out, generator);
  return out;
}

// Runs as one rank of a job.
Numbers shared(const Case& c) {
  const auto size = c.number("size");
  const auto y = at::arange(size, at::kLong);
  TensorDataset dataset(at::stack({y, y}, 1).to(at::kFloat), y);
  DistributedSampler sampler(size, static_cast<int>(c.number("rank")), static_cast<int>(c.number("ranks")),
                             {.seed = c.number("seed")});
  DataLoader loader(dataset, sampler,
                    {.batch_size = c.number("batch"), .num_workers = static_cast<int>(c.number("workers"))});
  Numbers out = {static_cast<std::int64_t>(loader.size())};
  for (int epoch = 0; epoch < 3; ++epoch) {
    sampler.set_epoch(epoch);
    append_batches(out, loader, 0);
  }
  append_draws(out, std::nullopt);
  return out;
}

// Two iterators, advanced alternately.
Numbers interleaved(const Case& c) {
  const auto y = at::arange(c.number("size"), at::kLong);
  DataLoader loader(TensorDataset{y}, {.batch_size = c.number("batch"), .shuffle = true});
  Numbers out;
  auto a = loader.begin(), b = loader.begin();
  for (; a != loader.end(); ++a, ++b)
    for (const auto& it : {a, b})
      for (std::int64_t i = 0; i < (*it)[0].size(0); ++i) out.push_back((*it)[0][i].item<std::int64_t>());
  append_draws(out, std::nullopt);
  return out;
}

Numbers answer(const Case& c) {
  if (c.kind == "distributed") {
    DistributedSampler sampler(
        c.number("size"), static_cast<int>(c.number("rank")), static_cast<int>(c.number("ranks")),
        {.shuffle = c.flag("shuffle"), .seed = c.number("seed"), .drop_last = c.flag("drop_last")});
    sampler.set_epoch(c.number("epoch"));
    Numbers out = {sampler.size()};
    append_pass(out, sampler, static_cast<std::size_t>(c.number("batch")));
    return out;
  }
  if (c.kind == "npy") {  // Prints dtype, shape, and bytes in C order.
    const auto tensor = read_npy(c.text("path"));
    Numbers out = {static_cast<std::int64_t>(tensor.scalar_type()), tensor.dim()};
    out.insert(out.end(), tensor.sizes().begin(), tensor.sizes().end());
    const auto dense = tensor.contiguous();
    const auto* bytes = static_cast<const unsigned char*>(dense.const_data_ptr());
    out.insert(out.end(), bytes, bytes + dense.nbytes());
    return out;
  }
  torch::manual_seed(static_cast<std::uint64_t>(c.number("seed")));
  if (c.kind == "loader") return loaded(c);
  if (c.kind == "interleaved") return interleaved(c);
  if (c.kind == "shared") return shared(c);
  const auto generator = c.generator("generator");
  if (c.kind == "random") {
    const auto num_samples = c.number("num_samples");
    RandomSampler sampler(c.number("size"),
                          {.replacement = c.flag("replacement"),
                           .num_samples = num_samples > 0 ? std::optional(num_samples) : std::nullopt,
                           .generator = generator});
    return sampled(sampler, c, generator);
  }
  if (c.kind == "subset") {
    SubsetRandomSampler sampler(c.list<std::int64_t>("indices"), generator);
    return sampled(sampler, c, generator);
  }
  if (c.kind == "weighted") {
    WeightedRandomSampler sampler(c.list<double>("weights"), c.number("num_samples"),
                                  {.replacement = c.flag("replacement"), .generator = generator});
    return sampled(sampler, c, generator);
  }
  if (c.kind == "split") {
    Numbers out;
    const auto size = c.number("size");
    for (const auto& subset :
         random_split(TensorDataset(at::arange(size)), c.list<double>("parts"), generator)) {
      out.push_back(subset.size());
      out.insert(out.end(), subset.indices().begin(), subset.indices().end());
    }
    append_draws(out, std::nullopt);
    if (generator) append_draws(out, generator);
    return out;
  }
  throw ConfigError("no kind of case: " + c.kind);
}

}  // namespace

MULTICALL_MAIN(data_probe) {
  for (std::string line; std::getline(std::cin, line);) {
    std::string text;
    try {
      for (const auto each : answer(Case(line))) text += std::to_string(each) + ' ';
    } catch (const std::exception& error) {
      text = std::string("error: ") + error.what();
      std::replace(text.begin(), text.end(), '\n', ' ');
    }
    std::cout << text << '\n';
  }
  return 0;
}

}  // namespace lockstep::testing::data_probe
