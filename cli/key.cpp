#include <iostream>
#include <memory>
#include <string>

#include <lockstep/control/link/key.h>

#include "verbs.h"

namespace lockstep::cli {

void add_key(CLI::App& app, Action& action) {
  auto path = std::make_shared<std::string>();
  auto* key =
      app.add_subcommand("key", "Create a key for a job on several hosts: lockstep key --output FILE");
  key->footer(
      "Example: lockstep key --output job.key, then on every host: lockstep run --key-file job.key ...\n"
      "Anyone with the key can join the job and end it: copy it to the other hosts as you would a "
      "password.");
  key->add_option("-o,--output", *path,
                  "Write the key to this new file, readable only by you (default: standard output)")
      ->type_name("FILE");
  key->callback([&action, path] {
    action = [path] {
      if (!path->empty()) {
        control::make_key_file(*path);
        return 0;
      }
      std::string text = control::make_key_text();
      std::cout << text << std::flush;
      control::forget(text);
      if (!std::cout) throw std::runtime_error("cannot write the key to standard output");
      return 0;
    };
  });
}

}  // namespace lockstep::cli
