#include <lockstep/control/link/secure_link.h>

#include <lockstep/base/error.h>

#include "support/errors.h"

namespace lockstep::testing {
namespace {

using control::FrameError;
using control::SecureLink;
using Side = SecureLink::Side;

const std::string kLinkKey(32, 'k');
const std::string kContext = "job 7, attempt 0, protocol 1";

SecureLink caller(const std::string& key = kLinkKey, const std::string& context = kContext) {
  return {Side::caller, key, context};
}
SecureLink listener(const std::string& key = kLinkKey, const std::string& context = kContext) {
  return {Side::listener, key, context};
}

std::string refusal(SecureLink& link, const std::string& bytes) {
  const auto text = error_of<FrameError>([&] { link.receive(bytes); });
  // After any error nothing more is sent, and nothing more is accepted.
  EXPECT_EQ(link.take_output(), "");
  EXPECT_FALSE(link.proven());
  EXPECT_EQ(link.next(), std::nullopt);
  EXPECT_THROW(link.receive({}), FrameError);
  EXPECT_THROW(link.send("x"), Error);
  return text;
}

// The four messages of the proof, as sent.
std::vector<std::string> shake_hands(SecureLink& from, SecureLink& to) {
  std::vector<std::string> said;
  for (int i = 0; i < 4; ++i) {
    said.push_back((i % 2 ? to : from).take_output());
    (i % 2 ? from : to).receive(said.back());
  }
  return said;
}

struct Pair {
  SecureLink from = caller(), to = listener();
  std::vector<std::string> said = shake_hands(from, to);

  std::string sealed(const std::string& message) {
    from.send(message);
    return from.take_output();
  }
};

TEST(SecureLink, both_sides_prove_the_key_and_then_talk) {
  Pair pair;
  ASSERT_TRUE(pair.from.proven() && pair.to.proven());
  for (const auto& message : pair.said) EXPECT_LE(message.size(), SecureLink::kMostBeforeProof);
  for (const std::string& text :
       {std::string("one"), std::string(), std::string(SecureLink::kMostMessage, 'x')}) {
    pair.from.send(text);
    pair.to.receive(pair.from.take_output());
    EXPECT_EQ(pair.to.next(), text);
    pair.to.send(text);
    pair.from.receive(pair.to.take_output());
    EXPECT_EQ(pair.from.next(), text);
  }
  EXPECT_EQ(pair.to.next(), std::nullopt);
}

TEST(SecureLink, it_does_not_matter_how_the_bytes_are_cut) {
  auto from = caller(), to = listener();
  auto pass = [](SecureLink& a, SecureLink& b) {
    for (const char byte : a.take_output()) b.receive({&byte, 1});
  };
  EXPECT_FALSE(to.proven());
  pass(from, to), pass(to, from), pass(from, to);
  EXPECT_TRUE(to.proven());
  EXPECT_FALSE(from.proven());
  // Data may arrive together with the last proof.
  to.send("first"), to.send("second");
  from.receive(to.take_output());
  EXPECT_EQ(from.next(), "first");
  EXPECT_EQ(from.next(), "second");
  from.send("third");
  pass(from, to);
  EXPECT_EQ(to.next(), "third");
}

TEST(SecureLink, it_can_be_moved_at_any_time) {
  auto first = caller();
  auto from = std::move(first);
  auto to = listener();
  to.receive(from.take_output());
  auto moved = std::move(to);
  from.receive(moved.take_output());
  moved.receive(from.take_output());
  auto again = std::move(moved);
  from.receive(again.take_output());
  from.send("x");
  again.receive(from.take_output());
  EXPECT_EQ(again.next(), "x");
}

TEST(SecureLink, nobody_speaks_before_the_caller_and_nothing_is_sent_before_the_proof) {
  auto to = listener();
  EXPECT_EQ(to.take_output(), "");
  EXPECT_THROW(to.send("x"), Error);
  auto from = caller();
  EXPECT_THROW(from.send("x"), Error);
  to.receive(from.take_output());
  EXPECT_THROW(to.send("x"), Error);
  // A stranger gets only a random challenge.
  const auto challenge = to.take_output();
  EXPECT_EQ(challenge.size(), 40);
  auto other = listener();
  other.receive(caller().take_output());
  EXPECT_NE(other.take_output().substr(8), challenge.substr(8));
}

TEST(SecureLink, another_key_or_context_does_not_fit) {
  std::string near = kLinkKey;
  near.back() ^= 1;
  for (auto [key, context] : {std::pair{std::string(32, 'x'), kContext},
                              {near, kContext},
                              {kLinkKey, std::string()},
                              {kLinkKey, std::string("job 7, attempt 1, protocol 1")},
                              {kLinkKey, std::string("job 6, attempt 0, protocol 1")}}) {
    auto from = caller(key, context), to = listener();
    to.receive(from.take_output());
    from.receive(to.take_output());
    EXPECT_EQ(refusal(to, from.take_output()), "it did not prove the key");
  }
}

TEST(SecureLink, a_listener_without_the_key_is_refused_too) {
  // It cannot pass the caller's proof itself, so it replays what it heard in another connection.
  Pair other;
  auto from = caller();
  from.take_output();
  from.receive(other.said[1]);
  EXPECT_EQ(refusal(from, other.said[3]), "it did not prove the key");
}

TEST(SecureLink, what_was_recorded_is_of_no_use_later) {
  Pair pair;
  const auto sealed = pair.sealed("end the job");
  auto to = listener();
  to.receive(pair.said[0]);
  to.take_output();
  EXPECT_EQ(refusal(to, pair.said[2]), "it did not prove the key");
  // In another connection of the same job, and a second time in the same one.
  Pair other;
  EXPECT_EQ(refusal(other.to, sealed), "a message was modified in transit");
  pair.to.receive(sealed);
  EXPECT_EQ(pair.to.next(), "end the job");
  EXPECT_EQ(refusal(pair.to, sealed), "a message was modified in transit");
}

TEST(SecureLink, what_is_sent_back_to_its_sender_is_refused) {
  auto from = caller();
  const auto hello = from.take_output();
  EXPECT_EQ(refusal(from, hello), "it reflected our own greeting");

  // A replayed proof, after the stranger's own challenge.
  auto again = caller();
  auto to = listener(std::string(32, 'x'));
  to.receive(again.take_output());
  again.receive(to.take_output());
  EXPECT_EQ(refusal(again, again.take_output()), "it did not prove the key");

  Pair pair;
  EXPECT_EQ(refusal(pair.from, pair.sealed("x")), "a message was modified in transit");
  Pair other;
  other.to.send("x");
  EXPECT_EQ(refusal(other.to, other.to.take_output()), "a message was modified in transit");
}

TEST(SecureLink, every_bit_of_the_proof_counts) {
  for (int message = 0; message < 4; ++message)
    for (std::size_t bit = 0; bit < 8 * Pair().said[message].size(); ++bit) {
      auto from = caller(), to = listener();
      bool refused = false;
      for (int i = 0; i < 4 && !refused; ++i) {
        auto said = (i % 2 ? to : from).take_output();
        if (i == message) said[bit / 8] = static_cast<char>(said[bit / 8] ^ (1 << bit % 8));
        try {
          (i % 2 ? from : to).receive(said);
        } catch (const FrameError&) {
          refused = true;
        }
      }
      EXPECT_TRUE(refused) << "message " << message << ", bit " << bit;
    }
}

TEST(SecureLink, every_bit_of_a_message_counts) {
  const std::size_t size = Pair().sealed("four").size();
  for (std::size_t bit = 0; bit < 8 * size; ++bit) {
    Pair pair;
    auto sealed = pair.sealed("four");
    sealed[bit / 8] = static_cast<char>(sealed[bit / 8] ^ (1 << bit % 8));
    try {
      pair.to.receive(sealed);
      // It claims to be longer, and no part of it is returned.
      EXPECT_LT(bit, 32);
      EXPECT_EQ(pair.to.next(), std::nullopt) << bit;
    } catch (const FrameError&) {
    }
  }
}

TEST(SecureLink, messages_out_of_order_or_left_out_are_refused) {
  for (bool swapped : {true, false}) {
    Pair pair;
    const auto one = pair.sealed("one"), two = pair.sealed("two");
    EXPECT_EQ(refusal(pair.to, swapped ? two + one : two), "a message was modified in transit");
  }
}

TEST(SecureLink, part_of_a_message_is_nothing) {
  Pair pair;
  const auto sealed = pair.sealed("a whole message");
  pair.to.receive(sealed);
  EXPECT_EQ(pair.to.next(), "a whole message");
  const auto cut = pair.sealed("another");
  pair.to.receive({cut.data(), cut.size() - 1});
  EXPECT_EQ(pair.to.next(), std::nullopt);
  // Data after a cut is taken as its end.
  EXPECT_EQ(refusal(pair.to, pair.sealed("third")), "a message was modified in transit");
}

TEST(SecureLink, a_length_is_believed_only_within_the_limit) {
  for (std::uint32_t length :
       {0u, 1u, 16u, static_cast<std::uint32_t>(SecureLink::kMostMessage + 18), 0xffffffffu}) {
    Pair pair;
    EXPECT_EQ(refusal(pair.to, std::string(reinterpret_cast<const char*>(&length), 4)),
              "it announced a message of " + std::to_string(length) + " bytes");
  }
  Pair pair;
  EXPECT_THAT(error_of<FrameError>([&] { pair.from.send(std::string(SecureLink::kMostMessage + 1, 'x')); }),
              HasSubstr("at most"));
  EXPECT_TRUE(pair.from.proven());  // Nothing was sent, and nothing is lost.
}

TEST(SecureLink, other_protocols_are_refused_at_their_first_byte) {
  for (const std::string& bytes :
       {std::string("GET / HTTP/1.1\r\n\r\n"), std::string("\x16\x03\x01"), std::string("SSH-2.0-x\r\n"),
        std::string("x"), std::string(1 << 20, '\0'), std::string("lockstp2")}) {
    auto to = listener();
    EXPECT_EQ(refusal(to, bytes), "it speaks another protocol");
    auto from = caller();
    EXPECT_EQ(refusal(from, bytes), "it speaks another protocol");
  }
}

TEST(SecureLink, who_does_not_wait_for_an_answer_is_refused) {
  auto from = caller();
  auto to = listener();
  EXPECT_EQ(refusal(to, from.take_output() + "x"), "it sent data out of turn");
  auto again = listener();
  again.receive(caller().take_output());
  EXPECT_EQ(refusal(again, std::string(4096, 'x')), "it sent data out of turn");
}

}  // namespace
}  // namespace lockstep::testing
