// The ops of a program. Every thread runs each of them, and does its share.
#pragma once

#include <algorithm>
#include <atomic>
#include <string>

#include "profile.h"
#include "runtime.h"

namespace octavo {

struct Share {
  int thread, num_threads;
};

// Units of unlike length, taken by whoever is free. Which thread takes which never changes a result.
class Units {
 public:
  void reset() { next_.store(0, std::memory_order_relaxed); }
  std::int64_t take() { return next_.fetch_add(1, std::memory_order_relaxed); }

  // Runs of units instead, long ones first and short ones at the end (guided self-scheduling, Polychronopoulos and Kuck,
  // 1987): few jumps for what streams from memory, and yet all threads finish together. Empty when nothing is left.
  struct Run {
    std::int64_t begin, end;
  };
  Run take_run(std::int64_t count, int num_threads) {
    std::int64_t begin = next_.load(std::memory_order_relaxed), end;
    do {
      if (begin >= count) return {count, count};
      end = begin + std::max<std::int64_t>(1, (count - begin) / (2 * num_threads));
    } while (!next_.compare_exchange_weak(begin, end, std::memory_order_relaxed));
    return {begin, end};
  }

 private:
  alignas(64) std::atomic<std::int64_t> next_ = 0;
};

// What one unit of a product covers.
struct Tile {
  std::int64_t rows = 1;
  int panels = 2;
};

class Op {
 public:
  // How an op is cut. Of ops that are cut by the same rows, a thread does the same rows each time: no barrier between.
  enum class Cut { kTokenRows, kLogitRows, kUnits };

  virtual ~Op() = default;
  virtual Cut cut(const Runtime& runtime) const = 0;
  virtual bool is_own(const Runtime&) const { return false; }  // each thread makes its own result: nobody need wait for it
  virtual void prepare(const Runtime&, int /*num_threads*/) {}  // before a step, by one thread
  virtual void run(const Runtime& runtime, Share share) = 0;

  // For profiles (profile.cpp): what is run, over which sizes, and what that costs in the step that is prepared.
  virtual std::string kind() const = 0;
  virtual std::string shape(const Runtime& runtime) const = 0;
  virtual Work work(const Runtime& runtime) const = 0;
};

// An op whose rows need nothing of each other: run(rows) for a thread's rows.
class RowOp : public Op {
 public:
  Cut cut(const Runtime& runtime) const override {
    return runtime.buffers[out_.buffer].selected ? Cut::kLogitRows : Cut::kTokenRows;
  }
  void run(const Runtime& runtime, Share share) override {
    const std::int64_t rows = runtime.rows(out_);
    const std::int64_t begin = rows * share.thread / share.num_threads;
    const std::int64_t end = rows * (share.thread + 1) / share.num_threads;
    if (begin < end) run_rows(runtime, begin, end);
  }

 protected:
  explicit RowOp(View out) : out_(out) {}
  virtual void run_rows(const Runtime& runtime, std::int64_t begin, std::int64_t end) = 0;
  View out_;  // for an op without output: what it reads
};

class EmbedOp final : public RowOp {
 public:
  EmbedOp(int weight, float scale, int first, View out) : RowOp(out), weight_(weight), first_(first), scale_(scale) {}
  std::string kind() const override { return "embed"; }
  std::string shape(const Runtime& runtime) const override;
  Work work(const Runtime& runtime) const override;

 private:
  void run_rows(const Runtime& runtime, std::int64_t begin, std::int64_t end) override;
  int weight_, first_;  // the id of the weight's first row; ids that it has not give zeros
  float scale_;
};

// Fills the tables of every rotation for a thread's rows of T; `any` is a view of T rows.
class RotationTableOp final : public RowOp {
 public:
  explicit RotationTableOp(View any) : RowOp(any) {}
  std::string kind() const override { return "rotation_table"; }
  std::string shape(const Runtime& runtime) const override;
  Work work(const Runtime& runtime) const override;

 private:
  void run_rows(const Runtime& runtime, std::int64_t begin, std::int64_t end) override;
};

class SelectRowsOp final : public RowOp {
 public:
  SelectRowsOp(View x, View out) : RowOp(out), x_(x) {}
  Cut cut(const Runtime&) const override { return Cut::kUnits; }  // reads rows of other threads
  std::string kind() const override { return "select_rows"; }
  std::string shape(const Runtime& runtime) const override;
  Work work(const Runtime& runtime) const override;

 private:
  void run_rows(const Runtime& runtime, std::int64_t begin, std::int64_t end) override;
  View x_;
};

class RmsNormOp final : public RowOp {
 public:
  RmsNormOp(View x, int weight, int groups, float eps, View out)
      : RowOp(out), x_(x), weight_(weight), groups_(groups), eps_(eps) {}
  std::string kind() const override { return "rms_norm"; }
  std::string shape(const Runtime& runtime) const override;
  Work work(const Runtime& runtime) const override;

 private:
  void run_rows(const Runtime& runtime, std::int64_t begin, std::int64_t end) override;
  View x_;
  int weight_, groups_;
  float eps_;
};

class RopeOp final : public RowOp {
 public:
  RopeOp(View x, int rotation, int heads, int head_dim, View out)
      : RowOp(out), x_(x), rotation_(rotation), heads_(heads), head_dim_(head_dim) {}
  std::string kind() const override { return "rope"; }
  std::string shape(const Runtime& runtime) const override;
  Work work(const Runtime& runtime) const override;

 private:
  void run_rows(const Runtime& runtime, std::int64_t begin, std::int64_t end) override;
  View x_;
  int rotation_, heads_, head_dim_;
};

class GateMulOp final : public RowOp {
 public:
  GateMulOp(View gate, View up, Gate f, int width, View out)
      : RowOp(out), gate_(gate), up_(up), f_(f), width_(width) {}
  std::string kind() const override;
  std::string shape(const Runtime& runtime) const override;
  Work work(const Runtime& runtime) const override;

 private:
  void run_rows(const Runtime& runtime, std::int64_t begin, std::int64_t end) override;
  View gate_, up_;
  Gate f_;
  int width_;
};

class AddOp final : public RowOp {
 public:
  AddOp(View a, View b, int width, View out) : RowOp(out), a_(a), b_(b), width_(width) {}
  std::string kind() const override { return "add"; }
  std::string shape(const Runtime& runtime) const override;
  Work work(const Runtime& runtime) const override;

 private:
  void run_rows(const Runtime& runtime, std::int64_t begin, std::int64_t end) override;
  View a_, b_;
  int width_;
};

// Writes K and V of a thread's tokens into the cache.
class StoreOp final : public RowOp {
 public:
  StoreOp(View k, View v, int cache) : RowOp(k), v_(v), cache_(cache) {}
  std::string kind() const override { return "store"; }
  std::string shape(const Runtime& runtime) const override;
  Work work(const Runtime& runtime) const override;

 private:
  void run_rows(const Runtime& runtime, std::int64_t begin, std::int64_t end) override;
  void store_codes(const Runtime& runtime, std::int64_t begin, std::int64_t end) const;
  View v_;
  int cache_;
};

// Rows as the next product, with a weight in few bits, needs them.
class QuantizeOp final : public RowOp {
 public:
  QuantizeOp(View x, int weight) : RowOp(x), weight_(weight) {}
  Cut cut(const Runtime& runtime) const override { return is_own(runtime) ? Cut::kUnits : RowOp::cut(runtime); }
  bool is_own(const Runtime& runtime) const override { return runtime.has_own_rows(runtime.rows(out_)); }
  void run(const Runtime& runtime, Share share) override {
    if (!is_own(runtime)) {
      RowOp::run(runtime, share);
    } else {
      quantize(runtime, 0, runtime.rows(out_), share.thread);
    }
  }
  std::string kind() const override { return "quantize"; }
  std::string shape(const Runtime& runtime) const override;
  Work work(const Runtime& runtime) const override;

 private:
  void run_rows(const Runtime& runtime, std::int64_t begin, std::int64_t end) override { quantize(runtime, begin, end, 0); }
  void quantize(const Runtime& runtime, std::int64_t begin, std::int64_t end, int thread) const;
  int weight_;
};

class MatmulOp final : public Op {
 public:
  MatmulOp(View x, int weight, int bias, Epilogue epilogue, View residual, int width, View out)
      : x_(x), weight_(weight), bias_(bias), epilogue_(epilogue), residual_(residual), width_(width), out_(out) {}
  Cut cut(const Runtime&) const override { return Cut::kUnits; }
  void prepare(const Runtime& runtime, int num_threads) override;
  void run(const Runtime& runtime, Share share) override;
  std::string kind() const override;
  std::string shape(const Runtime& runtime) const override;
  Work work(const Runtime& runtime) const override;

 private:
  bool gated() const { return epilogue_ == Epilogue::kSiluMul || epilogue_ == Epilogue::kGeluMul; }
  View x_;
  int weight_, bias_;  // bias: -1 is none
  Epilogue epilogue_;
  View residual_;
  int width_;
  View out_;
  Units units_;
  Tile tile_;
};

// float32 logits of the slice [logits_begin, logits_end) of S.
class LogitsOp final : public Op {
 public:
  LogitsOp(View x, int weight) : x_(x), weight_(weight) {}
  Cut cut(const Runtime&) const override { return Cut::kUnits; }
  void prepare(const Runtime& runtime, int num_threads) override;
  void run(const Runtime& runtime, Share share) override;
  std::string kind() const override { return "logits"; }
  std::string shape(const Runtime& runtime) const override;
  Work work(const Runtime& runtime) const override;

 private:
  View x_;
  int weight_;
  Units units_;
  Tile tile_;
};

class SoftcapOp final : public Op {
 public:
  SoftcapOp(float cap, int vocab_size) : cap_(cap), vocab_size_(vocab_size) {}
  Cut cut(const Runtime&) const override { return Cut::kUnits; }
  void run(const Runtime& runtime, Share share) override;
  std::string kind() const override { return "softcap"; }
  std::string shape(const Runtime& runtime) const override;
  Work work(const Runtime& runtime) const override;

 private:
  float cap_;
  int vocab_size_;
};

class AttentionOp final : public Op {
 public:
  AttentionOp(View q, int cache, int plan, int heads, float scale, float softcap, View out)
      : q_(q), cache_(cache), plan_(plan), heads_(heads), scale_(scale), softcap_(softcap), out_(out) {}
  Cut cut(const Runtime&) const override { return Cut::kUnits; }
  void prepare(const Runtime&, int) override { units_.reset(); }
  void run(const Runtime& runtime, Share share) override;
  std::string kind() const override { return "attention"; }
  std::string shape(const Runtime& runtime) const override;
  Work work(const Runtime& runtime) const override;

 private:
  View q_;
  int cache_, plan_, heads_;
  float scale_, softcap_;
  View out_;
  Units units_;
};

}  // namespace octavo
