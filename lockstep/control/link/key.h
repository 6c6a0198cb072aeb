// The job's key: 256 bits that every host of a job has and nobody else. Whoever proves it is of the job.
//
// It comes from a file or the environment and never from an argument, which every user of a host can read.
#pragma once

#include <optional>
#include <string>

namespace lockstep::control {

constexpr std::size_t kKeySize = 32;

// 64 hexadecimal digits and a newline: what a key file holds.
std::string make_key_text();

// Makes a new file that only this user can read, with a new key in it. ConfigError where there is one.
void make_key_file(const std::string& path);

// The key's 32 bytes: from key_file unless that is empty, else from the file that LOCKSTEP_KEY_FILE names,
// else from LOCKSTEP_KEY; nothing where there is none of them. ConfigError for a file that others may read.
std::optional<std::string> job_key(const std::string& key_file);

// Overwrites what is no longer needed, in a way that the compiler does not leave out.
void forget(std::string& secret) noexcept;

// Before the first call of libsodium; as often as one likes, from any thread.
void use_sodium();

}  // namespace lockstep::control
