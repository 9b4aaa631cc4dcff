// Enumerations of kernels.h by the names that Python knows them by.
#pragma once

#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "kernels.h"

namespace octavo {
namespace {

// Raises std::invalid_argument, with the names that there are.
template <class T, std::size_t N>
T named(const char* what, const std::string& name, const std::pair<const char*, T> (&known)[N]) {
  std::string names;
  for (const auto& [text, value] : known) {
    if (name == text) return value;
    names += names.empty() ? text : std::string(", ") + text;
  }
  throw std::invalid_argument(std::string("no ") + what + " " + name + "; there are " + names);
}

[[maybe_unused]] Epilogue epilogue_of(const std::string& name) {
  return named<Epilogue>("epilogue", name,
                         {{"store", Epilogue::kStore},
                          {"add", Epilogue::kAdd},
                          {"silu_mul", Epilogue::kSiluMul},
                          {"gelu_mul", Epilogue::kGeluMul},
                          {"float", Epilogue::kFloat}});
}

[[maybe_unused]] Gate gate_of(const std::string& name) {
  return named<Gate>("gate", name, {{"silu", Gate::kSilu}, {"gelu", Gate::kGelu}});
}

[[maybe_unused]] Activations activations_of(const std::string& name) {
  return named<Activations>(
      "activations of type", name,
      {{"int8", Activations::kInt8}, {"int16", Activations::kInt16}, {"bfloat16", Activations::kBfloat16}});
}

[[maybe_unused]] KvType kv_type_of(const std::string& name) {
  return named<KvType>("keys and values of type", name, {{"bfloat16", KvType::kBfloat16}, {"int8", KvType::kInt8}});
}

}  // namespace
}  // namespace octavo
