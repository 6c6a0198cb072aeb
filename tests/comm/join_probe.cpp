// Joins and says what it sees, or why it could not; the tests start several of these.
#include <iostream>

#include <lockstep/lockstep.h>

int main(int argc, char** argv) {
  try {
    auto world = lockstep::World::from_environment({.backend = argc > 1 ? argv[1] : ""});
    std::cout << "rank " << world.rank() << " of " << world.size() << ", local " << world.local_rank()
              << " of " << world.local_size() << ", " << world.group().backend() << std::endl;
    world.group().barrier().wait();
    if (argc > 2) throw std::runtime_error(argv[2]);  // unwinds through ~World
    return 0;
  } catch (const lockstep::ConfigError& error) {
    std::cout << "ConfigError: " << error.what() << std::endl;
    return 3;
  } catch (const lockstep::CommError& error) {
    std::cout << "CommError: " << error.what() << std::endl;
    return 4;
  } catch (const std::exception& error) {
    std::cout << "exception: " << error.what() << std::endl;
    return 5;
  }
}
