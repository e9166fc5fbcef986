use deepburn_nvme::IoPolicy;

use super::*;

/// Returns a store in host memory and a store in a file.
fn stores() -> [Store; 2] {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let file = SwapFile::create(folder, 1 << 20, &IoPolicy::default()).unwrap();
    [Store::Host, Store::Disk(Arc::new(file))]
}

fn layout(len: usize, chunk: usize) -> ChunkLayout {
    ChunkLayout { len, chunk, element_bytes: 4 }
}

fn zeros(store: &Store, layout: ChunkLayout) -> Arc<ParkedArray> {
    ParkedArray::zeros(store, layout, &Ledger::new(), Category::Optimizer).unwrap()
}

fn bytes(values: &[f32]) -> &[u8] {
    bytemuck::cast_slice(values)
}

fn counted(len: usize) -> Vec<f32> {
    (0..len).map(|value| value as f32).collect()
}

fn floats(copy: &ParkedCopy, range: Range<usize>) -> Vec<f32> {
    copy.read(range).unwrap().into_vec().unwrap()
}

fn whole(array: &ParkedArray) -> Vec<f32> {
    use burn_flex::{Flex, FlexDevice};
    let tensor = ParkedTensor { array, dtype: DType::F32 }.read::<Flex>(&FlexDevice).unwrap();
    deepburn_ops::float_into_host::<Flex>(tensor)
}

#[test]
fn chunks_are_one_array() {
    let values = counted(3000);
    for (store, tier) in stores().iter().zip([Tier::Host, Tier::Disk]) {
        for chunk in [1, 3, 1000, 1024, 2048, 3000, usize::MAX] {
            let (ledger, layout) =
                (Ledger::new(), layout(if chunk < 4 { 10 } else { 3000 }, chunk));
            let array = ParkedArray::zeros(store, layout, &ledger, Category::Optimizer).unwrap();
            let values = &values[..layout.len];
            assert_eq!(whole(&array), vec![0.0; layout.len]);
            array.write(bytes(values), DType::F32, &mut WriteBehind::new(4096)).unwrap();
            assert_eq!(whole(&array), values);
            let end = layout.len - 1;
            assert_eq!(floats(&array.copy(2..end, DType::F32), 1..end - 3), values[3..end - 1]);
            let bytes = match tier {
                Tier::Disk => layout.file_bytes() as usize,
                _ => layout.len * 4,
            };
            assert_eq!(ledger.usage_on(tier, Category::Optimizer).current, bytes);
            assert_eq!(ledger.usage(Category::Optimizer).current, 0);
            drop(array);
            assert_eq!(ledger.usage_on(tier, Category::Optimizer).current, 0);
        }
    }
}

/// The gradient of one micro-batch may have a narrower type than the sum of several.
#[test]
fn types_may_change() {
    for store in stores() {
        let array = zeros(&store, layout(2500, 1000));
        let narrow: Vec<u8> = (0..5000).map(|byte| byte as u8).collect();
        array.write(&narrow, DType::F16, &mut WriteBehind::new(0)).unwrap();
        let copy = array.copy(3..2400, DType::F16);
        array.write(bytes(&counted(2500)), DType::F32, &mut WriteBehind::new(0)).unwrap();
        assert_eq!(&*copy.read(0..2397).unwrap().bytes, &narrow[6..4800]);
        assert_eq!(whole(&array), counted(2500));
    }
}

#[test]
fn a_copy_keeps_what_it_was_made_of() {
    for store in stores() {
        let array = zeros(&store, layout(10, 4));
        let mut pipeline = Pipeline::new(PipelinePolicy { reads_ahead: true, writes_behind: true });
        let reads = array.chunks().filter_map(|chunk| array.file_chunk(&chunk, DType::F32));
        pipeline.start(reads.collect(), 4096).unwrap();
        for range in array.chunks() {
            let mut chunk = array.chunk(&range, DType::F32, &mut pipeline).unwrap();
            for (index, value) in range.zip(chunk.floats()) {
                *value = index as f32;
            }
            chunk.store(&mut pipeline).unwrap();
        }
        let copy = array.copy(3..8, DType::F32);
        drop(array.copy(0..10, DType::F32));
        array.write(bytes(&[-1.0; 10]), DType::F32, &mut WriteBehind::new(0)).unwrap();
        assert_eq!(floats(&copy, 0..5), [3.0, 4.0, 5.0, 6.0, 7.0]);
        assert_eq!((copy.numel(), floats(&copy, 4..5)), (5, vec![7.0]));
        assert_eq!(floats(&array.copy(0..2, DType::F32), 0..2), [-1.0, -1.0]);
    }
}

#[test]
fn nothing_is_parked_of_a_rank_without_elements() {
    for store in stores() {
        let array = zeros(&store, layout(0, 4));
        assert_eq!((array.chunks().count(), array.layout.file_bytes()), (0, 0));
        array.write(&[], DType::F32, &mut WriteBehind::new(0)).unwrap();
        assert!(whole(&array).is_empty() && array.copy(0..0, DType::F32).numel() == 0);
    }
}

#[test]
fn arrays_without_memory_are_errors() {
    let array = ParkedArray::zeros(
        &Store::Host,
        layout(1 << 58, CHUNK),
        &Ledger::new(),
        Category::Optimizer,
    );
    let Err(error) = array else { panic!("2^60 bytes of memory") };
    assert!(error.to_string().contains("out of host memory: cannot allocate 1152921504606846976"));
}
