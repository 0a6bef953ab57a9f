// The instructions of kernels/ptx/address.cuh for the emulator.
#pragma once

#include "../prelude.cuh"

namespace microsdpa {

// Addresses of shared memory.

inline uint32 shared_address(const void* pointer, emulator::Place place = emulator::Place::here()) {
  return emulator::shared_address(pointer, place);
}

// Addresses in a cluster's shared memory.

struct ClusterAddress {
  uint32 value;
};

inline ClusterAddress peer_address(const void* shared, int rank, emulator::Place place = emulator::Place::here()) {
  return {emulator::peer_address(shared, rank, place)};
}

inline ClusterAddress operator+(ClusterAddress address, int bytes) {
  return {address.value + static_cast<uint32>(bytes)};
}

// Dynamic shared memory, where each block has its own.

template <typename T>
inline T& dynamic_shared(emulator::Place place = emulator::Place::here()) {
  static_assert(alignof(T) <= 1024, "dynamic shared memory starts on 1024 bytes");
  return *reinterpret_cast<T*>(emulator::dynamic_shared(sizeof(T), place));
}

}  // namespace microsdpa
