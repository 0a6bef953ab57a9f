// One kernel of a plan, its launch attributes and its arguments.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "../kernels/common/params.cuh"
#include "driver.h"
#include "tensor_map.h"

namespace microsdpa {

// Whether kernels that support it may begin before the kernel ahead of them has ended.
inline std::atomic<bool> programmatic_enabled{true};

struct KernelLaunch {
  CUfunction function;
  unsigned grid[3];
  unsigned threads;
  unsigned shared_bytes;
  unsigned cluster;       // CTAs of a cluster, along x
  bool programmatic;      // it waits itself for the kernel ahead of it (programmatic dependent launch)
  bool heads_as_queries;  // its operands are those of heads_as_queries() in standard_params.h
  // Of the tiles of a kernel whose parameter is that of sequences.h; 0 for others.
  unsigned sequence_rows, sequence_keys;
  std::vector<EncodedTensorMap> tensor_maps;  // at most MAX_TENSOR_MAPS, arguments after the parameters

  static constexpr std::size_t MAX_TENSOR_MAPS = 8;

  // `params` is the kernel's first argument. `addresses` are the operands' addresses in this call, of those at least
  // that have tensor maps. Nothing that is shared between calls is written.
  // `ctas`, unless it is null, replaces the grid, and `maps`, a null pointer behind them, the tensor maps.
  void issue(const Driver& driver, CUstream stream, void* params, const std::uintptr_t* addresses,
             const unsigned* ctas = nullptr, const CUtensorMap* const* maps = nullptr) const {
    void* arguments[1 + MAX_TENSOR_MAPS] = {params};
    CUtensorMap moved[MAX_TENSOR_MAPS];
    for (std::size_t i = 0; i < tensor_maps.size(); ++i) {
      const EncodedTensorMap& encoded = tensor_maps[i];
      const std::uintptr_t address = addresses[encoded.spec.operand] + encoded.spec.offset;
      arguments[1 + i] = const_cast<CUtensorMap*>(&encoded.map);
      if (address != encoded.address) {
        moved[i] = encoded.map;
        driver.check(driver.tensor_map_replace_address(&moved[i], reinterpret_cast<void*>(address)),
                     "cuTensorMapReplaceAddress");
        arguments[1 + i] = &moved[i];
      }
    }
    for (std::size_t i = 0; maps && maps[i]; ++i) arguments[1 + i] = const_cast<CUtensorMap*>(maps[i]);
    CUlaunchAttribute attributes[2];
    CUlaunchConfig config{};
    if (!ctas) ctas = grid;
    config.gridDimX = ctas[0], config.gridDimY = ctas[1], config.gridDimZ = ctas[2];
    config.blockDimX = threads, config.blockDimY = 1, config.blockDimZ = 1;
    config.sharedMemBytes = shared_bytes;
    config.hStream = stream;
    config.attrs = attributes;
    if (cluster > 1) {
      CUlaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
      attribute.value.clusterDim = {cluster, 1, 1};
    }
    if (programmatic && programmatic_enabled.load(std::memory_order_relaxed)) {
      CUlaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
      attribute.value.programmaticStreamSerializationAllowed = 1;
    }
    driver.check(driver.launch(&config, function, arguments, nullptr), "cuLaunchKernelEx");
  }
};

}  // namespace microsdpa
