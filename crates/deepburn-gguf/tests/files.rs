//! Files that are written and read back, and files that are not written.

use std::fs;
use std::path::Path;

use deepburn_gguf::{GgufError, GgufHeader, GgufReader, GgufWriter, Metadata, TensorType, Value};
use proptest::prelude::*;

fn header(tensors: &[(&str, TensorType, &[u64])]) -> GgufHeader {
    let mut metadata = Metadata::new();
    metadata.push("general.architecture", "test").unwrap();
    let mut header = GgufHeader::new(metadata).unwrap();
    for (name, tensor_type, shape) in tensors {
        header.push(*name, *tensor_type, shape).unwrap();
    }
    header
}

fn create(folder: &Path, header: GgufHeader) -> Result<GgufWriter, GgufError> {
    GgufWriter::create(folder.join("model.gguf"), folder.join("model.partial"), header)
}

fn num_files(folder: &Path) -> usize {
    fs::read_dir(folder).unwrap().count()
}

/// A value of a random type.
fn value() -> impl Strategy<Value = Value> {
    prop_oneof![
        any::<u8>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-1e30_f32..1e30).prop_map(Value::from),
        any::<bool>().prop_map(Value::from),
        ".{0,20}".prop_map(Value::from),
        prop::collection::vec(".{0,5}", 0..10).prop_map(Value::from),
        prop::collection::vec(any::<u16>(), 0..10).prop_map(Value::from),
        prop::collection::vec(any::<bool>(), 0..10).prop_map(Value::from),
        prop::collection::vec(-1e300_f64..1e300, 0..10).prop_map(Value::from),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn headers_read_back(
        values in prop::collection::vec(value(), 0..12),
        shapes in prop::collection::vec((0..9_usize, prop::collection::vec(1..5_u64, 1..5)), 0..6),
    ) {
        let mut metadata = Metadata::new();
        for (index, value) in values.into_iter().enumerate() {
            metadata.push(format!("key.{index}"), value).unwrap();
        }
        let mut header = GgufHeader::new(metadata).unwrap();
        for (index, (tensor_type, mut shape)) in shapes.into_iter().enumerate() {
            let tensor_type = TensorType::ALL[tensor_type];
            *shape.last_mut().unwrap() *= tensor_type.block_len() as u64;
            header.push(format!("tensor.{index}"), tensor_type, &shape).unwrap();
        }
        let bytes = header.to_bytes();
        let (read, start) = GgufHeader::read(&bytes[..], header.file_len()).unwrap();
        prop_assert_eq!(start, bytes.len() as u64);
        prop_assert_eq!(read.metadata(), header.metadata());
        prop_assert_eq!(read.tensors(), header.tensors());
        prop_assert_eq!(read.to_bytes(), &bytes[..]);
        // Version 2 is the same.
        let older = [&bytes[..4], &[2], &bytes[5..]].concat();
        prop_assert!(GgufHeader::read(&older[..], header.file_len()).is_ok());
    }
}

#[test]
fn tensors_are_written_in_any_order_and_in_parts() {
    let folder = tempfile::tempdir().unwrap();
    let header = header(&[
        ("a", TensorType::F32, &[3, 5]),
        ("b", TensorType::Q8_0, &[4, 64]),
        ("c", TensorType::Bf16, &[7]),
    ]);
    let file_len = header.file_len();
    let mut writer = create(folder.path(), header).unwrap();
    let a: Vec<f32> = (0..15).map(|i| i as f32).collect();
    let b: Vec<f32> = (0..256).map(|i| (i % 128) as f32 - 64.0).collect();
    writer.write("c", &[1.5; 7]).unwrap();
    writer.write("b", &b[..64]).unwrap();
    writer.write("a", &a[..5]).unwrap();
    writer.write("b", &b[64..]).unwrap();
    writer.write("a", &a[5..]).unwrap();
    writer.finish().unwrap();

    let path = folder.path().join("model.gguf");
    assert_eq!(fs::metadata(&path).unwrap().len(), file_len);
    let mut reader = GgufReader::open(&path).unwrap();
    assert_eq!(reader.read("a").unwrap(), a);
    assert_eq!(reader.read("c").unwrap(), [1.5; 7]);
    let close = |(left, right): (&f32, &f32)| (left - right).abs() <= 0.26;
    assert!(reader.read("b").unwrap().iter().zip(&b).all(close));
    assert!(reader.read("d").unwrap_err().to_string().contains("`d`"));
    assert_eq!(num_files(folder.path()), 1);
}

#[test]
fn a_failed_write_names_the_tensor_and_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let tensors: [(&str, TensorType, &[u64]); 1] = [("a", TensorType::Q8_0, &[4, 32])];
    let mut values = [1.0; 64];
    values[40] = f32::NAN;
    let writes: [(&str, &[f32], &str); 5] = [
        ("b", &[1.0; 32], "not in the header"),
        ("a", &[1.0; 33], "whole rows"),
        ("a", &[1.0; 160], "128 elements"),
        ("a", &values, "element 72 is NaN"),
        ("a", &[1e30; 32], "from 32 to 63"),
    ];
    for (name, values, expected) in writes {
        let mut writer = create(folder.path(), header(&tensors)).unwrap();
        writer.write("a", &[1.0; 32]).unwrap();
        let error = writer.write(name, values).unwrap_err().to_string();
        assert!(error.contains(&format!("`{name}`")) && error.contains(expected), "{error}");
        let error = writer.finish().unwrap_err().to_string();
        assert!(error.contains("`a`") && error.contains("34 of 136 bytes"), "{error}");
        assert_eq!(num_files(folder.path()), 0);
    }
}

#[test]
fn an_incomplete_or_extended_file_is_an_error() {
    let header = header(&[("a", TensorType::F32, &[3]), ("b", TensorType::F32, &[3])]);
    let bytes = header.to_bytes();
    let end = bytes.len() as u64 + 32 + 12;
    // The padding after the last tensor may be missing.
    assert!(GgufHeader::read(&bytes[..], end).is_ok());
    let error = GgufHeader::read(&bytes[..], end - 1).unwrap_err().to_string();
    let expected = format!(
        "size of the file: is {} bytes, and its tensors need {end}, up to `b`: it is incomplete; download",
        end - 1
    );
    assert!(error.starts_with(&expected), "{error}");
    // Within the header, the size that it needs is not known yet. Padding follows the last
    // description.
    for len in 24..bytes.len() {
        let error = GgufHeader::read(&bytes[..len], len as u64).unwrap_err().to_string();
        let size = [
            format!("the {len} bytes of the file, within its header"),
            format!("is {len} bytes, and"),
        ];
        let has_size = size.iter().any(|size| error.contains(size));
        assert!(has_size && error.contains("it is incomplete; download"), "{len}: {error}");
    }
    assert!(GgufHeader::read(&bytes[..], header.file_len()).is_ok());
    let error = GgufHeader::read(&bytes[..], header.file_len() + 1).unwrap_err().to_string();
    assert!(error.contains("size of the file"), "{error}");
}

#[test]
fn other_files_are_named() {
    let read = |bytes: &[u8]| GgufHeader::read(bytes, bytes.len() as u64).unwrap_err().to_string();
    assert!(read(b"PK\x03\x04 and more").contains("PK"));
    assert!(read(b"GG").contains("start of the file"));
    assert!(read(b"GGUF\x00\x00\x00\x03").contains("big-endian"));
    assert!(read(b"GGUF\x01\x00\x00\x00").contains("is 1"));
    let many = [&b"GGUF\x03\0\0\0"[..], &(1_u64 << 60).to_le_bytes(), &[0; 8]].concat();
    assert!(read(&many).contains("number of tensors"));
    // A key `a` with a list.
    let list = |elements: u32, rest: &[u8]| {
        let key = [&1_u64.to_le_bytes()[..], b"a", &9_u32.to_le_bytes()].concat();
        let start = [&b"GGUF\x03\0\0\0"[..], &[0; 8], &1_u64.to_le_bytes()].concat();
        let list = [&elements.to_le_bytes()[..], &1_u64.to_le_bytes()].concat();
        read(&[&start[..], &key, &list, rest].concat())
    };
    let text = list(8, &[&1_u64.to_le_bytes()[..], b"\xff"].concat());
    assert!(text.contains("metadata `a`: is not UTF-8"), "{text}");
    assert!(list(9, &[0; 16]).contains("array of arrays"));
}
