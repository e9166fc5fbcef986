//! Compares blocks and values with llama.cpp's, which `tests/data/make_blocks.py` has written with
//! the `gguf` package.

use std::path::Path;

use deepburn_gguf::{Array, GgufReader, TensorType, Value};

fn data() -> GgufReader<std::io::BufReader<std::fs::File>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/blocks.gguf");
    GgufReader::open(path).unwrap()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn blocks_and_values_equal_llama_cpp() {
    let mut file = data();
    let values = file.read("values").unwrap();
    for tensor_type in TensorType::ALL.into_iter().filter(|it| it.is_quantized()) {
        let name = tensor_type.name();
        let mut blocks = Vec::new();
        file.read_bytes(name, &mut blocks).unwrap();
        let mut encoded = Vec::new();
        tensor_type.encode(&values, &mut encoded).unwrap();
        assert!(encoded == blocks, "{name}");
        let decoded = file.read(&format!("{name}.decoded")).unwrap();
        assert_eq!(bits(&file.read(name).unwrap()), bits(&decoded), "{name}");
        // Rows are read as they are in the whole tensor.
        let mut rows = Vec::new();
        file.read_rows(name, 2..5, &mut rows).unwrap();
        assert_eq!(bits(&rows), bits(&decoded[2 * 256..5 * 256]), "{name}");
        let error = file.read_rows(name, 5..9, &mut rows).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("8 rows"), "{error}");
    }
}

#[test]
fn metadata_of_each_type_is_read() {
    let file = data();
    let metadata = file.header().metadata();
    let expected = [
        ("u8", Value::U8(u8::MAX)),
        ("i8", Value::I8(i8::MIN)),
        ("u16", Value::U16(u16::MAX)),
        ("i16", Value::I16(i16::MIN)),
        ("u32", Value::U32(u32::MAX)),
        ("i32", Value::I32(i32::MIN)),
        ("f32", Value::F32(0.1)),
        ("bool", Value::Bool(true)),
        ("string", Value::from("naïve ✓")),
        ("u64", Value::U64(u64::MAX)),
        ("i64", Value::I64(i64::MIN)),
        ("f64", Value::F64(0.1)),
        ("strings", Value::from(["", "a", "é"].map(str::to_owned).to_vec())),
        ("numbers", Value::Array(Array::I32(vec![-1, 0, i32::MAX]))),
        ("floats", Value::from(vec![0.5_f32, -1.5])),
        ("bools", Value::from(vec![true, false])),
    ];
    for (key, value) in expected {
        assert_eq!(metadata.get(key), Some(&value), "{key}");
    }
}

#[test]
fn a_header_is_written_as_gguf_writes_it() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/blocks.gguf");
    let file = std::fs::read(path).unwrap();
    let bytes = data().header().to_bytes();
    assert!(file.starts_with(&bytes));
}
