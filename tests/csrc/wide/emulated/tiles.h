// AMX's tile registers, palette 1, as Intel's Software Developer's Manual describes them, one set for each thread.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulated {

inline float from_bfloat16(std::uint16_t value) {
  const std::uint32_t bits = std::uint32_t{value} << 16;
  float out;
  std::memcpy(&out, &bits, sizeof(out));
  return out;
}

// Subnormal numbers are zeros, as inputs (DAZ) and as results (FTZ).
inline float flush(float value) { return std::fabs(value) < FLT_MIN ? std::copysign(0.0f, value) : value; }

inline std::uint16_t to_bfloat16(float value) {
  const float flushed = flush(value);
  std::uint32_t bits;
  std::memcpy(&bits, &flushed, sizeof(bits));
  if (std::isnan(value)) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

class Tiles {
 public:
  void configure(const void* config) {
    std::uint8_t bytes[64];
    std::memcpy(bytes, config, sizeof(bytes));
    require(bytes[0] == 1 && bytes[1] == 0, "palette 1, start_row 0");
    for (int i = 2; i < 16; ++i) require(bytes[i] == 0, "reserved bytes are 0");
    for (int tile = 0; tile < 16; ++tile) {
      std::uint16_t line_bytes;
      std::memcpy(&line_bytes, bytes + 16 + 2 * tile, sizeof(line_bytes));
      const std::uint8_t lines = bytes[48 + tile];
      require(tile < 8 || (line_bytes == 0 && lines == 0), "8 tiles");
      require(line_bytes <= 64 && line_bytes % 4 == 0 && lines <= 16, "a tile is at most 16 lines of 64 bytes");
      require((line_bytes == 0) == (lines == 0), "an empty tile has neither lines nor bytes");
      if (tile < 8) tiles_[tile] = Tile{lines, line_bytes, {}};
    }
    configured_ = true;
  }

  void release() {
    configured_ = false;
    for (Tile& tile : tiles_) tile = Tile{};
  }

  void zero(int tile) { std::memset(at(tile).data, 0, sizeof(Tile::data)); }

  void load(int tile, const void* base, long stride) {
    Tile& t = at(tile);
    std::memset(t.data, 0, sizeof(t.data));
    for (int line = 0; line < t.lines; ++line) {
      std::memcpy(t.data[line], static_cast<const char*>(base) + line * stride, t.line_bytes);
    }
  }

  void store(int tile, void* base, long stride) {
    Tile& t = at(tile);
    for (int line = 0; line < t.lines; ++line) {
      std::memcpy(static_cast<char*>(base) + line * stride, t.data[line], t.line_bytes);
    }
  }

  // The even k of the tiles are summed by fused multiply-adds from zero, the odd ones too, then the two, then C.
  void multiply_bf16(int c, int a, int b) {
    check(c, a, b);
    float x[16][32], y[16][32];
    widen(a, x);
    widen(b, y);
    for (int m = 0; m < tiles_[c].lines; ++m) {
      for (int n = 0; n < tiles_[c].line_bytes / 4; ++n) {
        float even = 0.0f, odd = 0.0f;
        for (int k = 0; k < tiles_[b].lines; ++k) {
          even = flush(std::fmaf(x[m][2 * k], y[k][2 * n], even));
          odd = flush(std::fmaf(x[m][2 * k + 1], y[k][2 * n + 1], odd));
        }
        put(c, m, n, flush(flush(get<float>(c, m, n)) + flush(even + odd)));
      }
    }
  }

  // Four products of signed bytes to a sum of 32 bits, without saturation.
  void multiply_int8(int c, int a, int b) {
    check(c, a, b);
    const auto& x = tiles_[a].data;
    const auto& y = tiles_[b].data;
    for (int m = 0; m < tiles_[c].lines; ++m) {
      for (int n = 0; n < tiles_[c].line_bytes / 4; ++n) {
        std::uint32_t sum = get<std::uint32_t>(c, m, n);
        for (int k = 0; k < tiles_[b].lines; ++k) {
          for (int i = 0; i < 4; ++i) {
            const std::int32_t left = static_cast<std::int8_t>(x[m][4 * k + i]);
            const std::int32_t right = static_cast<std::int8_t>(y[k][4 * n + i]);
            sum += static_cast<std::uint32_t>(left * right);
          }
        }
        put(c, m, n, sum);
      }
    }
  }

  bool configured() const { return configured_; }

 private:
  struct Tile {
    int lines = 0;
    int line_bytes = 0;
    std::uint8_t data[16][64] = {};
  };

  static void require(bool holds, const char* rule) {
    if (holds) return;
    std::fprintf(stderr, "the processor would refuse this tile operation: %s\n", rule);
    std::abort();
  }

  Tile& at(int tile) {
    require(configured_, "a configuration is loaded on this thread");
    require(tile >= 0 && tile < 8 && tiles_[tile].lines > 0, "the tile is configured");
    return tiles_[tile];
  }

  void check(int c, int a, int b) {
    require(c != a && c != b && a != b, "three different tiles");
    require(at(c).lines == at(a).lines, "C has A's lines");
    require(at(c).line_bytes == at(b).line_bytes, "C has B's columns");
    require(at(a).line_bytes == 4 * at(b).lines, "A has as many k as B");
  }

  void widen(int tile, float (&out)[16][32]) const {
    for (int line = 0; line < tiles_[tile].lines; ++line) {
      for (int i = 0; i < tiles_[tile].line_bytes / 2; ++i) {
        out[line][i] = flush(from_bfloat16(get<std::uint16_t>(tile, line, i)));
      }
    }
  }

  template <typename T>
  T get(int tile, int line, int element) const {
    T value;
    std::memcpy(&value, tiles_[tile].data[line] + element * static_cast<int>(sizeof(T)), sizeof(T));
    return value;
  }

  template <typename T>
  void put(int tile, int line, int element, T value) {
    std::memcpy(tiles_[tile].data[line] + element * static_cast<int>(sizeof(T)), &value, sizeof(T));
  }

  bool configured_ = false;
  Tile tiles_[8];
};

inline thread_local Tiles tiles;

}  // namespace emulated
