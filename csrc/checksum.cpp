#include "checksum.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <vector>

namespace octavo {

namespace {

constexpr std::size_t kPiece = 1 << 20;  // bytes that one thread takes at a time
constexpr int kLanes = 8;

// For a given word this maps sums one to one, and for a given sum it maps words one to one: no single change is lost. Without
// turning the bits, two changes of a lane's top bits would cancel out.
std::uint64_t add(std::uint64_t sum, std::uint64_t word) { return std::rotl(sum ^ word, 29) * 0x9e3779b97f4a7c15u; }

std::uint64_t sum_piece(ByteSpan piece) {
  std::uint64_t lanes[kLanes] = {1, 2, 3, 4, 5, 6, 7, 8}, words[kLanes];
  for (; piece.size() >= sizeof words; piece = piece.subspan(sizeof words)) {
    std::memcpy(words, piece.data(), sizeof words);
    for (int i = 0; i < kLanes; ++i) lanes[i] = add(lanes[i], words[i]);
  }
  std::uint64_t sum = 0;
  for (const std::uint64_t lane : lanes) sum = add(sum, lane);
  return sum;
}

}  // namespace

std::uint64_t checksum(Pool& pool, std::span<const ByteSpan> parts) {
  std::vector<ByteSpan> pieces;
  for (ByteSpan part : parts) {
    for (; part.size() > kPiece; part = part.subspan(kPiece)) pieces.push_back(part.first(kPiece));
    pieces.push_back(part);
  }
  std::vector<std::uint64_t> sums(pieces.size());
  std::atomic<std::size_t> next = 0;
  pool.run([&](int) {
    for (std::size_t i = next++; i < pieces.size(); i = next++) sums[i] = sum_piece(pieces[i]);
  });
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) sum = add(add(sum, pieces[i].size()), sums[i]);
  return sum;
}

}  // namespace octavo
