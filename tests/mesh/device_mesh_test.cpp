#include <lockstep/mesh/device_mesh.h>

#include <thread>

#include "support/ranks.h"
#include "support/values.h"

namespace lockstep::testing {
namespace {

TEST(DeviceMesh, axes_have_sizes_coordinates_and_groups) {
  run_threads(8, [](World& world) {
    DeviceMesh mesh(world, {{"pp", 2}, {"dp", -1}, {"tp", 2}});
    EXPECT_EQ(mesh.axes(), (std::vector<std::string>{"pp", "dp", "tp"}));
    EXPECT_EQ(mesh.size(), 8);
    EXPECT_EQ(mesh.size("dp"), 2);
    const int pp = mesh.coordinate("pp"), dp = mesh.coordinate("dp"), tp = mesh.coordinate("tp");
    EXPECT_EQ(world.rank(), (pp * 2 + dp) * 2 + tp);
    EXPECT_EQ(mesh["tp"].ranks(), (std::vector<int>{world.rank() - tp, world.rank() - tp + 1}));
    EXPECT_EQ(mesh["tp"].rank(), tp);
    EXPECT_EQ(mesh["pp"].ranks(), (std::vector<int>{dp * 2 + tp, dp * 2 + tp + 4}));
    EXPECT_EQ(mesh["dp"].name(), "dp");
    auto sum = at::full({1}, world.rank(), at::kLong);
    mesh["dp"].all_reduce(sum).wait();
    EXPECT_EQ(sum.item<std::int64_t>(), 2 * (pp * 4 + tp) + 2);
  });
}

TEST(DeviceMesh, several_axes_make_one_group_or_a_smaller_mesh) {
  run_threads(8, [](World& world) {
    DeviceMesh mesh(world, {{"pp", 2}, {"dp", 2}, {"tp", 2}});
    auto group = mesh.group({"tp", "pp"});  // In the order of the mesh, regardless of the order here.
    const int dp = mesh.coordinate("dp");
    EXPECT_EQ(group.ranks(), (std::vector<int>{2 * dp, 2 * dp + 1, 2 * dp + 4, 2 * dp + 5}));
    EXPECT_EQ(mesh.group({"pp", "tp"}).name(), "pp.tp");
    auto part = mesh.slice({"dp", "tp"});
    EXPECT_EQ(part.size(), 4);
    EXPECT_EQ(part.axes(), (std::vector<std::string>{"dp", "tp"}));
    EXPECT_EQ(part.coordinate("dp"), dp);
    EXPECT_EQ(part.ranks().front(), 4 * mesh.coordinate("pp"));
    EXPECT_EQ(part["tp"].ranks(), mesh["tp"].ranks());
    auto sum = at::ones({1});
    part.group({"dp", "tp"}).all_reduce(sum).wait();
    EXPECT_EQ(sum.item<float>(), 4);
    EXPECT_THROW((void)part["pp"], ConfigError);
  });
}

TEST(DeviceMesh, names_with_dots_are_names) {
  run_threads(8, [](World& world) {
    DeviceMesh mesh(world, {{"a", 2}, {"b", 2}, {"a.b", 2}});
    EXPECT_EQ(mesh.group({"a", "b"}).size(), 4);
    EXPECT_EQ(mesh["a.b"].size(), 2);
  });
}

TEST(DeviceMesh, groups_may_be_made_by_several_threads_in_any_order) {
  run_threads(8,
              [](World& world) {
                DeviceMesh mesh(world, {{"a", 2}, {"b", 2}, {"c", 2}});
                auto make = [&](const char* axis) { EXPECT_EQ(mesh.group({"a", axis}).size(), 4); };
                const bool swap = world.rank() % 2 == 1;
                std::thread other([&] { make(swap ? "c" : "b"); });
                make(swap ? "b" : "c");
                other.join();
              },
              {.join_timeout = std::chrono::seconds(120)});
}

TEST(DeviceMesh, a_world_of_one_has_a_mesh_of_ones) {
  run_threads(1, [](World& world) {
    DeviceMesh mesh(world, {{"dp", 1}, {"tp", 1}});
    auto tensor = at::ones({2});
    mesh["tp"].all_reduce(tensor).wait();
    EXPECT_SAME(tensor, at::ones({2}));
  });
}

TEST(DeviceMesh, what_does_not_fit_is_refused_with_the_names) {
  run_threads(4, [](World& world) {
    auto refuses = [&](DeviceMesh::Axes axes, const char* part) {
      EXPECT_THAT(error_of<ConfigError>([&] { DeviceMesh(world, axes); }),
                  AllOf(HasSubstr(part), HasSubstr("4 ranks")));
    };
    refuses({{"dp", 2}, {"tp", 3}}, "multiply to 6");
    refuses({{"dp", 3}, {"tp", -1}}, "multiply to 3");
    refuses({{"dp", -1}, {"tp", -1}}, "at most one size");
    refuses({{"dp", 2}, {"dp", 2}}, "names must be distinct");
    refuses({{"", 4}}, "name");
    refuses({{"dp", 0}}, "dp=0");
    refuses({}, "at least one axis");
    DeviceMesh mesh(world, {{"dp", 4}});
    EXPECT_THAT(error_of<ConfigError>([&] { (void)mesh["tp"]; }), AllOf(HasSubstr("'tp'"), HasSubstr("dp")));
    EXPECT_THROW((void)mesh.size("x"), ConfigError);
    EXPECT_THROW((void)mesh.group({}), ConfigError);
    EXPECT_THROW((void)mesh.slice({"dp", "dp"}), ConfigError);
  });
}

}  // namespace
}  // namespace lockstep::testing
