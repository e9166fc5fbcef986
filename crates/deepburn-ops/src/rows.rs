//! Rows of a table that are added to a dense array.

use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{Backend, TensorData, TensorMetadata};

use crate::host::{float_from_host, float_into_host, int_into_host, view_float};

/// The rows of one lookup: `values[i]` is added to row `indices[i]` of the table.
#[derive(Debug, Clone)]
pub struct RowBlock<B: Backend> {
    /// The row numbers, of shape `[k]`. The values of a row number that occurs more than once are
    /// summed.
    pub indices: IntTensor<B>,
    /// The rows to add, of shape `[k, row length]`.
    pub values: FloatTensor<B>,
}

/// Adds rows as [`SumOps::add_rows`](crate::SumOps::add_rows) describes it, in host memory.
///
/// Only the values of blocks with a row in the part are copied to the host. Without such a row,
/// `sum` is returned unchanged.
pub fn add_rows_on_host<B: Backend>(
    sum: FloatTensor<B>,
    start: usize,
    blocks: &[RowBlock<B>],
) -> FloatTensor<B> {
    let (device, shape) = (B::float_device(&sum), sum.shape());
    let part = start..start + shape.num_elements();
    let mut dense = None;
    let mut unread = Some(sum);
    for block in blocks {
        let row_len = block.values.shape()[1].max(1);
        // The elements that a row and the part have in common.
        let common = |row: i64| {
            let first = row as usize * row_len;
            (part.start.max(first)..part.end.min(first + row_len), first)
        };
        let rows = int_into_host::<B>(block.indices.clone());
        if rows.iter().all(|row| common(*row).0.is_empty()) {
            continue;
        }
        if let Some(sum) = unread.take() {
            dense = Some(float_into_host::<B>(sum));
        }
        let values = view_float::<B>(block.values.clone()).convert::<f32>();
        let values = values.as_slice::<f32>().expect("the data was converted to f32 just before");
        for (row, values) in rows.into_iter().zip(values.chunks_exact(row_len)) {
            let (common, first) = common(row);
            if let (Some(dense), false) = (&mut dense, common.is_empty()) {
                let sums = &mut dense[common.start - part.start..common.end - part.start];
                let values = &values[common.start - first..common.end - first];
                sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
            }
        }
    }
    match (dense, unread) {
        (Some(dense), _) => float_from_host::<B>(TensorData::new(dense, shape), &device),
        (None, Some(sum)) => sum,
        (None, None) => unreachable!("the sum is taken only where it becomes dense"),
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn_flex::{Flex, FlexDevice};

    use super::*;
    use crate::int_from_host;

    fn floats(values: Vec<f32>, shape: &[usize]) -> FloatTensor<Flex> {
        float_from_host::<Flex>(TensorData::new(values, shape.to_vec()), &FlexDevice)
    }

    fn block(indices: &[i64], first: f32) -> RowBlock<Flex> {
        let values = (0..indices.len() * 3).map(|i| first + i as f32).collect();
        RowBlock {
            indices: int_from_host::<Flex>(indices.to_vec(), &FlexDevice),
            values: floats(values, &[indices.len(), 3]),
        }
    }

    /// A table of four rows of 3. Parts cut rows 1 and 3.
    #[test]
    fn rows_of_a_part_are_added_in_the_order_of_the_blocks() {
        let blocks = [block(&[2, 0, 2], 1.0), block(&[3, 1], 1e4)];
        let mut table = [0.5; 12];
        for (row, first) in [(2, 1.0), (0, 4.0), (2, 7.0), (3, 1e4), (1, 1e4 + 3.0)] {
            for column in 0..3 {
                table[row * 3 + column] += first + column as f32;
            }
        }
        for part in [0..12, 4..11, 0..3, 5..6, 11..12] {
            let dense = floats(vec![0.5; part.len()], &[part.len()]);
            let sum = add_rows_on_host::<Flex>(dense, part.start, &blocks);
            assert_eq!(sum.shape().num_elements(), part.len());
            assert_eq!(float_into_host::<Flex>(sum), table[part.clone()], "{part:?}");
        }
        // Parts without rows, and no blocks at all.
        for (start, blocks) in [(12, &blocks[..]), (3, &blocks[..1]), (0, &[])] {
            let dense = floats(vec![-0.0; 3], &[3]);
            let sum = float_into_host::<Flex>(add_rows_on_host::<Flex>(dense, start, blocks));
            assert!(sum.iter().all(|x| x.to_bits() == (-0f32).to_bits()), "{start}: {sum:?}");
        }
    }
}
