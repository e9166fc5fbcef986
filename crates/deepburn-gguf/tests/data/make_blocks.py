"""Writes blocks.gguf: values, the blocks of llama.cpp's reference quantizers, and the values that it reads from them.

pip install gguf xllamacpp numpy
python make_blocks.py

gguf writes the file, and the functions of llama.cpp are called in the library of xllamacpp. Metadata has a value of
each type.
"""

import ctypes
import os
import pathlib

import gguf
import numpy as np
import xllamacpp

TYPES = {
    "q4_0": ("q4_0", gguf.GGMLQuantizationType.Q4_0),
    "q5_0": ("q5_0", gguf.GGMLQuantizationType.Q5_0),
    "q8_0": ("q8_0", gguf.GGMLQuantizationType.Q8_0),
    "q4_k": ("q4_K", gguf.GGMLQuantizationType.Q4_K),
    "q5_k": ("q5_K", gguf.GGMLQuantizationType.Q5_K),
    "q6_k": ("q6_K", gguf.GGMLQuantizationType.Q6_K),
}


def rows():
    """Rows of 256 values: like weights, with outliers, all negative, zero, constant, tied, denormal and mixed."""
    rng = np.random.default_rng(7)
    normal = rng.standard_normal(256)
    zeros = np.where(np.arange(256) < 128, 0.0, -0.0)
    return np.stack(
        [
            normal * 0.02,
            np.where(rng.random(256) < 0.02, 10, 0.01) * normal,
            -np.abs(normal) - 1,
            zeros,
            np.repeat(rng.standard_normal(8), 32),
            rng.integers(-8, 8, 256) * 0.25,
            normal * 1e-41,
            np.repeat(10.0 ** rng.uniform(-40, 3, 16), 16) * normal,
        ]
    ).astype(np.float32)


def add_metadata(writer):
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -128)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -32768)
    writer.add_uint32("u32", 4294967295)
    writer.add_int32("i32", -2147483648)
    writer.add_float32("f32", 0.1)
    writer.add_bool("bool", True)
    writer.add_string("string", "naïve ✓")
    writer.add_uint64("u64", 18446744073709551615)
    writer.add_int64("i64", -9223372036854775808)
    writer.add_float64("f64", 0.1)
    writer.add_array("strings", ["", "a", "é"])
    writer.add_array("numbers", [-1, 0, 2147483647])
    writer.add_array("floats", [0.5, -1.5])
    writer.add_array("bools", [True, False])


def main():
    folder = pathlib.Path(__file__).parent
    library = next(pathlib.Path(xllamacpp.__file__).parent.glob("xllamacpp*.so"))
    llama_cpp = ctypes.CDLL(str(library), mode=os.RTLD_LAZY)
    values = rows()
    count = ctypes.c_int64(values.size)
    pointer = lambda array: array.ctypes.data_as(ctypes.c_void_p)
    writer = gguf.GGUFWriter(folder / "blocks.gguf", "test")
    add_metadata(writer)
    writer.add_tensor("values", values)
    for name, (function, kind) in TYPES.items():
        block_len, block_size = gguf.GGML_QUANT_SIZES[kind]
        blocks = np.zeros((len(values), 256 // block_len * block_size), np.uint8)
        getattr(llama_cpp, f"quantize_row_{function}_ref")(pointer(values), pointer(blocks), count)
        decoded = np.zeros_like(values)
        getattr(llama_cpp, f"dequantize_row_{function}")(pointer(blocks), pointer(decoded), count)
        writer.add_tensor(name, blocks, raw_dtype=kind)
        writer.add_tensor(f"{name}.decoded", decoded)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main()
