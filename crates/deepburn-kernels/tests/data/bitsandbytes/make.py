"""Writes NF4 codes and scales of bitsandbytes 0.50.2 on the CPU, for src/quantized/tests.rs.

pip install torch bitsandbytes; python make.py
codes.bin       the packed codes of the values, two in a byte
scales.bin      the largest magnitude of each block, f32
double.bin      the same scales after double quantization, f32
The values: element i of block b is (hash(i) / 2^32 - 0.5) * (b % 7 + 1) / 100, in f32; block 5 is zero
"""

import numpy
import torch
from bitsandbytes import functional

BLOCKS = 260
index = numpy.arange(64 * BLOCKS, dtype=numpy.uint64)
hashed = (index * 2654435761) % 2**32
values = ((hashed / 2**32 - 0.5) * (index // 64 % 7 + 1) / 100).astype(numpy.float32)
values[64 * 5 : 64 * 6] = 0
values = torch.from_numpy(values)
codes, state = functional.quantize_4bit(values, quant_type="nf4")
codes.numpy().tofile("codes.bin")
state.absmax.numpy().tofile("scales.bin")
_, state = functional.quantize_4bit(values, quant_type="nf4", compress_statistics=True)
scales = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
scales.numpy().astype("<f4").tofile("double.bin")
