//! Attention over cached keys and values, and writing to the cache.

use burn::tensor::{DType, Tensor};
use burn_flex::{Flex, FlexTensor};
use deepburn_ops::{
    AttentionMask, AttentionOps, SelfAttention, attention_over_cache, portable, write_to_cache,
};

use crate::{Array, DTYPES, assert_close, reference, same_on_all_threads, tolerance, values};

/// The heads of queries and of keys and values, and the width of a head.
const HEADS: [usize; 2] = [6, 2];
const WIDTH: usize = 5;
const POSITIONS: usize = 9;
const BATCH: usize = 2;

fn options(mask: AttentionMask, soft_cap: Option<f64>) -> SelfAttention {
    let [heads, key_value_heads] = HEADS;
    SelfAttention {
        batch: BATCH,
        heads,
        key_value_heads,
        scale: 0.7,
        soft_cap,
        upcast: false,
        mask,
    }
}

/// Returns queries, keys and values of random sequences `[batch, heads, positions, width]`, and the
/// rows that they are part of.
fn projected(dtype: DType) -> ([Tensor<Flex, 4>; 3], Array) {
    let [heads, own] = HEADS;
    let all = heads + 2 * own;
    let rows = Array::new([BATCH * POSITIONS, all * WIDTH], 1).rounded(dtype);
    let by_head = rows.tensor(dtype).reshape([BATCH, POSITIONS, all, WIDTH]).swap_dims(1, 2);
    let part = |first, count| by_head.clone().narrow(1, first, count);
    ([part(0, heads), part(heads, own), part(heads + own, own)], rows)
}

fn primitive<const D: usize>(tensor: Tensor<Flex, D>) -> FlexTensor {
    tensor.into_primitive().tensor()
}

/// Returns a cache with room for more positions than it is given. The room has NaN, which must not
/// be read.
fn cached(rows: &Tensor<Flex, 4>, filled: usize) -> Tensor<Flex, 4> {
    let [batch, heads, _, width] = rows.dims();
    let options = (&rows.device(), rows.dtype());
    let empty = Tensor::full([batch, heads, POSITIONS + 3, width], f32::NAN, options);
    write_to_cache(empty, rows.clone().narrow(2, 0, filled), 0)
}

/// Each position of a sequence, computed over the positions up to it, has the output of the whole
/// sequence.
#[test]
fn cached_positions_agree_with_f64() {
    let masks = [AttentionMask::Causal, AttentionMask::Window(3), AttentionMask::Window(20)];
    let cases = masks.into_iter().flat_map(|mask| [None, Some(2.0)].map(|cap| (mask.clone(), cap)));
    for (options, dtype) in
        cases.flat_map(|(mask, cap)| DTYPES.map(|dtype| (options(mask.clone(), cap), dtype)))
    {
        let ([queries, keys, values_of], rows) = projected(dtype);
        let zeros = Array::new([BATCH * POSITIONS, HEADS[0] * WIDTH], 2);
        let [whole, _] = reference::attention(&rows, &options, |_, _, _| 1.0, &zeros);
        for filled in 1..=POSITIONS {
            let query = queries.clone().narrow(2, filled - 1, 1);
            let cache = [&keys, &values_of].map(|rows| cached(rows, filled));
            let width = HEADS[0] * WIDTH;
            let expected: Vec<f64> = (0..BATCH)
                .flat_map(|it| &whole[((it * POSITIONS) + filled - 1) * width..][..width])
                .copied()
                .collect();
            let kernel = attention_over_cache(query.clone(), cache.clone(), filled, &options);
            let cache = cache.map(primitive);
            let plain =
                portable::cache::attention::<Flex>(primitive(query), cache, filled, &options);
            // The portable implementation rounds 16-bit scores and weights too.
            for (name, found, factor) in
                [("kernel", values(primitive(kernel)), 1.0), ("portable", values(plain), 4.0)]
            {
                let what = format!("{name} {filled} {dtype:?} {options:?}");
                assert_close(&found, &expected, tolerance(dtype) * factor, &what);
            }
        }
    }
}

/// Several new positions attend to the cached ones and to each other.
#[test]
fn several_new_positions_agree_with_f64() {
    for mask in [AttentionMask::Causal, AttentionMask::Window(3)] {
        let options = options(mask, None);
        let ([queries, keys, values_of], rows) = projected(DType::F32);
        let zeros = Array::new([BATCH * POSITIONS, HEADS[0] * WIDTH], 2);
        let [whole, _] = reference::attention(&rows, &options, |_, _, _| 1.0, &zeros);
        let cache = [&keys, &values_of].map(|rows| cached(rows, POSITIONS));
        let new = 4;
        let queries = queries.narrow(2, POSITIONS - new, new);
        let found = attention_over_cache(queries, cache, POSITIONS, &options);
        let width = HEADS[0] * WIDTH;
        let expected: Vec<f64> = (1..=BATCH)
            .flat_map(|it| &whole[(it * POSITIONS - new) * width..][..new * width])
            .copied()
            .collect();
        assert_close(&values(primitive(found)), &expected, tolerance(DType::F32), "new positions");
    }
}

/// Long sequences of wide heads are distributed over threads.
#[test]
fn threads_do_not_change_a_bit() {
    let attention = SelfAttention {
        batch: 1,
        heads: 8,
        key_value_heads: 4,
        ..options(AttentionMask::Causal, None)
    };
    let rows = Array::new([16 * 700, 64], 3).tensor(DType::F32);
    let rows = rows.reshape([1, 16, 700, 64]);
    same_on_all_threads(|| {
        let [keys, own] = [0, 4].map(|first| rows.clone().narrow(1, first, 4).mul_scalar(1.0));
        let query = rows.clone().narrow(1, 8, 8).narrow(2, 0, 1);
        values(primitive(attention_over_cache(query, [keys, own], 700, &attention)))
    });
}

#[test]
fn rows_are_written_in_place() {
    for dtype in DTYPES {
        let ([_, keys, _], _) = projected(dtype);
        let place = |cache: &FlexTensor| cache.bytes().as_ptr();
        let mut cache = primitive(cached(&keys, 4));
        let first = place(&cache);
        for position in 4..POSITIONS {
            let row = primitive(keys.clone().narrow(2, position, 1));
            cache = Flex::write_to_cache(cache, row, position);
            assert_eq!(place(&cache), first, "{dtype:?}: the cache is copied");
        }
        assert_eq!(values(cache.narrow(2, 0, POSITIONS)), values(primitive(keys.clone())));
        // Another owner keeps its values.
        let before = values(cache.clone());
        let row = primitive(keys.narrow(2, 0, 1));
        let other = Flex::write_to_cache(cache.clone(), row.clone(), 5);
        assert_eq!(format!("{:?}", values(cache)), format!("{before:?}"));
        let plain = portable::cache::write::<Flex>(other.clone(), row, 5);
        assert_eq!(format!("{:?}", values(other)), format!("{:?}", values(plain)));
    }
}
