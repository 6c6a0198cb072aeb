// The job's key: 256 random bits shared by the hosts of a job. A peer that proves it belongs to the job.
//
// It is read from a file or the environment, never from an argument, which every user of a host can read.
#pragma once

#include <optional>
#include <string>

namespace lockstep::control {

constexpr std::size_t kKeySize = 32;

// Returns 64 hexadecimal digits and a newline: the content of a key file.
std::string make_key_text();

// Creates a new file, readable only by this user, with a new key. Throws ConfigError if the file exists.
void make_key_file(const std::string& path);

// Returns the key's 32 bytes: from key_file unless that is empty, else from the file named by
// LOCKSTEP_KEY_FILE, else from LOCKSTEP_KEY; nullopt if none is set. Throws ConfigError for a file that other
// users may read.
std::optional<std::string> job_key(const std::string& key_file);

// Overwrites a secret in a way the compiler does not optimise away.
void forget(std::string& secret) noexcept;

// Call before using libsodium; any number of times, from any thread.
void use_sodium();

}  // namespace lockstep::control
