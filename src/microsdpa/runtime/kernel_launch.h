// One kernel of a plan and its launch attributes.
#pragma once

#include <atomic>
#include <cstdint>

#include "driver.h"

namespace microsdpa {

// Whether kernels that support it may begin before the kernel ahead of them has ended.
inline std::atomic<bool> programmatic_enabled{true};

struct KernelLaunch {
  CUfunction function;
  unsigned grid[3];
  unsigned threads;
  unsigned shared_bytes;
  unsigned cluster;   // CTAs of a cluster, along x
  bool programmatic;  // it waits itself for the kernel ahead of it (programmatic dependent launch)

  void issue(const Driver& driver, CUstream stream, void** arguments) const {
    CUlaunchAttribute attributes[2];
    CUlaunchConfig config{};
    config.gridDimX = grid[0], config.gridDimY = grid[1], config.gridDimZ = grid[2];
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
