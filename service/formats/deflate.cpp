// Planes of labels as zlib streams (RFC 1950 and 1951), much faster than zlib's own fastest level.
//
// Labels repeat what is beside them, and what is in the line above: only there are repetitions looked for, one pixel to
// either side of it included, and what was found is written with the fixed codes of the format, which need no table.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t LONGEST = 258, SHORTEST = 3;
constexpr uint32_t ADLER = 65521;
constexpr int LITERALS = 256, LENGTHS = 259, LITERAL_BITS = 9;

struct Code {
  uint32_t bits;
  int32_t count;
};

uint32_t reversed(uint32_t code, int count) {
  uint32_t bits = 0;
  for (int i = 0; i < count; ++i)
    bits |= (code >> i & 1) << (count - 1 - i);
  return bits;
}

// The fixed code of a symbol, RFC 1951 3.2.6; codes are stored from their highest bit on.
Code symbol_code(int symbol) {
  if (symbol < 144)
    return {reversed(0x30 + symbol, 8), 8};
  if (symbol < 256)
    return {reversed(0x190 + symbol - 144, 9), 9};
  if (symbol < 280)
    return {reversed(symbol - 256, 7), 7};
  return {reversed(0xC0 + symbol - 280, 8), 8};
}

// The code of a number in one of several ranges that become twice as wide every `step`, with its place in the range.
Code range_code(uint32_t number, int step_bits, int *range) {
  int extra = 0;
  while (number >> (extra + step_bits + 1))
    ++extra;
  *range = static_cast<int>((extra << step_bits) + (number >> extra));
  return {number & ((1u << extra) - 1), extra};
}

Code length_code(int length) {
  if (length == LONGEST)
    return symbol_code(285);
  int range;
  const Code extra = range_code(static_cast<uint32_t>(length - SHORTEST), 2, &range);
  const Code symbol = symbol_code(257 + range);
  return {symbol.bits | extra.bits << symbol.count, symbol.count + extra.count};
}

Code distance_code(uint32_t distance) {
  int range;
  const Code extra = range_code(distance - 1, 1, &range);
  return {reversed(static_cast<uint32_t>(range), 5) | extra.bits << 5, 5 + extra.count};
}

struct Codes {
  std::array<Code, LITERALS> literal;
  std::array<Code, LENGTHS> length;
  Codes() : literal(), length() {
    for (int value = 0; value < LITERALS; ++value)
      literal[value] = symbol_code(value);
    for (int value = SHORTEST; value < LENGTHS; ++value)
      length[value] = length_code(value);
  }
};

// Bits go out from the lowest one on. Writes up to eight bytes beyond what it has been given.
class Writer {
public:
  explicit Writer(uint8_t *out) : out_(out) {}

  void put(Code code) {
    bits_ |= static_cast<uint64_t>(code.bits) << held_;
    held_ += code.count;
    std::memcpy(out_, &bits_, sizeof bits_);
    out_ += held_ >> 3;
    bits_ >>= held_ & ~7;
    held_ &= 7;
  }

  uint8_t *end() const { return out_ + (held_ > 0); }

private:
  uint8_t *out_;
  uint64_t bits_ = 0;
  int held_ = 0;
};

// How many bytes are the same, at most `most`.
int64_t alike(const uint8_t *a, const uint8_t *b, int64_t most) {
  int64_t n = 0;
  for (; n + 8 <= most; n += 8) {
    uint64_t x, y;
    std::memcpy(&x, a + n, 8);
    std::memcpy(&y, b + n, 8);
    if (x != y)
      return n + (__builtin_ctzll(x ^ y) >> 3);
  }
  while (n < most && a[n] == b[n])
    ++n;
  return n;
}

uint32_t adler32(const uint8_t *data, int64_t size) {
  uint32_t a = 1, b = 0;
  // As many as 32 bits can sum up.
  for (constexpr int64_t block = 4096; size > 0; size -= block, data += block) {
    const uint32_t count = static_cast<uint32_t>(std::min(size, block));
    uint32_t sum = 0, weighted = 0;
    for (uint32_t i = 0; i < count; ++i) {
      sum += data[i];
      weighted += (count - i) * data[i];
    }
    b = (b + count * a + weighted % ADLER) % ADLER;
    a = (a + sum) % ADLER;
  }
  return b << 16 | a;
}

uint8_t *compress(const Codes &codes, const uint8_t *data, int64_t size, int64_t row, int64_t pixel, uint8_t *out) {
  // How far to look back, the line above first: of equals the first is taken.
  const std::array<int64_t, 4> distances = {row, pixel, row - pixel, row + pixel};
  std::array<Code, 4> behind{};
  for (size_t i = 0; i < distances.size(); ++i)
    if (distances[i] > 0)
      behind[i] = distance_code(static_cast<uint32_t>(distances[i]));
  out[0] = 0x78, out[1] = 0x01;
  Writer writer(out + 2);
  writer.put({0b011, 3});
  for (int64_t place = 0; place < size;) {
    const int64_t most = std::min(size - place, LONGEST);
    int64_t best = SHORTEST - 1;
    size_t chosen = 0;
    for (size_t i = 0; i < distances.size() && best < most; ++i) {
      const int64_t distance = distances[i];
      if (distance <= 0 || distance > place)
        continue;
      const int64_t length = alike(data + place, data + place - distance, most);
      if (length > best)
        best = length, chosen = i;
    }
    if (best >= SHORTEST) {
      writer.put(codes.length[best]);
      writer.put(behind[chosen]);
      place += best;
    } else {
      writer.put(codes.literal[data[place++]]);
    }
  }
  writer.put(symbol_code(256));
  uint8_t *end = writer.end();
  const uint32_t sum = adler32(data, size);
  for (int shift = 24; shift >= 0; shift -= 8)
    *end++ = static_cast<uint8_t>(sum >> shift);
  return end;
}

} // namespace

// Compresses every plane by itself; the streams follow each other in `out`.
//
// pixels  [planes, rows, width], of `pixel` bytes each; a line has at most 2^14 bytes
// out     room for 9 bits of every byte, and 24 bytes for each plane
// ends    [planes]: where each stream ends
extern "C" void stackseg_deflate(const uint8_t *pixels, int64_t planes, int64_t rows, int64_t width, int64_t pixel,
                                 uint8_t *out, int64_t *ends) {
  static const Codes codes;
  const int64_t row = width * pixel, size = rows * row;
  uint8_t *end = out;
  for (int64_t i = 0; i < planes; ++i) {
    end = compress(codes, pixels + i * size, size, row, pixel, end);
    ends[i] = end - out;
  }
}
