//! Modules with encoded matrices, against the same modules with the elements of the blocks.

use burn::module::{Module, Param, ParamId};
use burn::tensor::backend::Backend;
use burn::tensor::module::embedding;
use burn::tensor::{Int, Tensor, TensorData};
use burn_flex::{Flex, FlexDevice};
use deepburn_kernels::RowEncoding;
use deepburn_ops::linear;
use deepburn_zero::inference::{EncodedMatrix, encoded};
use deepburn_zero::{RowOrder, Zero};

type Plain = Zero<Flex>;

const VOCAB: usize = 70;
const WIDTH: usize = 32;
const INNER: usize = 96;

/// A model with a tied table, two linear layers and a norm.
#[derive(Module, Debug)]
struct Net<B: Backend> {
    table: Param<Tensor<B, 2>>,
    layers: Vec<Layer<B>>,
    scale: Param<Tensor<B, 1>>,
}

#[derive(Module, Debug)]
struct Layer<B: Backend> {
    weight: Param<Tensor<B, 2>>,
}

/// Returns a matrix whose elements are multiples of 1/64 with at most 7 bits, which bf16 represents
/// exactly.
fn matrix<B: Backend>([rows, columns]: [usize; 2], seed: usize) -> Tensor<B, 2> {
    let value = |i: usize| ((i * 37 + seed) % 127) as f32 / 64.0 - 1.0;
    let values: Vec<f32> = (0..rows * columns).map(value).collect();
    Tensor::from_data(TensorData::new(values, [rows, columns]), &Default::default())
}

/// Returns a parameter that is not initialized.
fn lazy<B: Backend<Device = FlexDevice>>(shape: [usize; 2], seed: usize) -> Param<Tensor<B, 2>> {
    Param::uninitialized(
        ParamId::new(),
        move |_, _| matrix(shape, seed),
        FlexDevice,
        false,
        shape.into(),
    )
}

impl<B: Backend<Device = FlexDevice> + deepburn_ops::LinearOps> Net<B> {
    fn new() -> Self {
        Self {
            table: lazy([VOCAB, WIDTH], 1),
            layers: vec![
                Layer { weight: lazy([WIDTH, INNER], 2) },
                Layer { weight: lazy([INNER, WIDTH], 3) },
            ],
            scale: Param::from_tensor(Tensor::ones([WIDTH], &FlexDevice) * 0.5),
        }
    }

    /// Returns the logits of tokens.
    fn logits(&self, ids: &[i64]) -> Vec<f32> {
        let ids = Tensor::<B, 2, Int>::from_data(
            TensorData::new(ids.to_vec(), [1, ids.len()]),
            &FlexDevice,
        );
        let mut x = embedding(self.table.val(), ids).squeeze_dim::<2>(0);
        for layer in &self.layers {
            x = linear(x, layer.weight.val(), None) * 0.25;
        }
        let logits = (x * self.scale.val().unsqueeze()).matmul(self.table.val().transpose());
        logits.into_data().to_vec().unwrap()
    }
}

/// Returns the words of values in bf16.
fn bf16_words(values: &[f32]) -> Vec<u32> {
    let halves: Vec<u32> = values.iter().map(|value| value.to_bits() >> 16).collect();
    halves.chunks(2).map(|pair| pair[0] | pair.get(1).unwrap_or(&0) << 16).collect()
}

fn transposed(values: &[f32], columns: usize) -> Vec<f32> {
    (0..columns).flat_map(|column| values.iter().skip(column).step_by(columns).copied()).collect()
}

/// Returns the model with its matrices in bf16, and the paths and shapes that were offered.
fn held() -> (Net<Plain>, Vec<(String, [usize; 2])>) {
    let mut offered = Vec::new();
    let net = encoded::<Flex, _, String>(Net::<Plain>::new(), |candidate| {
        offered.push((candidate.path.to_owned(), candidate.shape));
        let values = candidate.values()?;
        let (order, values) = match candidate.path {
            "table" => (RowOrder::ByRow, values),
            _ => (RowOrder::ByColumn, transposed(&values, candidate.shape[1])),
        };
        let words = bf16_words(&values);
        Ok(Some(EncodedMatrix { format: RowEncoding::Bf16, order, words }))
    });
    (net.unwrap(), offered)
}

#[test]
fn a_model_computes_with_its_encoded_matrices() {
    let (net, offered) = held();
    let expected = [
        ("table", [VOCAB, WIDTH]),
        ("layers.0.weight", [WIDTH, INNER]),
        ("layers.1.weight", [INNER, WIDTH]),
    ];
    assert_eq!(offered, expected.map(|(path, shape)| (path.to_owned(), shape)));
    let twin = Net::<Flex>::new();
    for ids in [&[3, 69, 0][..], &[5]] {
        let (found, expected) = (net.logits(ids), twin.logits(ids));
        let size = expected.iter().fold(1.0_f32, |size, it| size.max(it.abs()));
        for (found, expected) in found.iter().zip(&expected) {
            // The values are the same, and f32 sums differ in their order.
            assert!((found - expected).abs() <= 1e-5 * size, "{ids:?}: {found} {expected}");
        }
    }
    // All other ops get the elements.
    let elements: Vec<f32> = net.layers[0].weight.val().into_data().to_vec().unwrap();
    assert_eq!(elements, matrix::<Flex>([WIDTH, INNER], 2).into_data().to_vec::<f32>().unwrap());
}

#[test]
fn matrices_may_stay_as_they_are() {
    let net = encoded::<Flex, _, String>(Net::<Plain>::new(), |_| Ok(None)).unwrap();
    assert!(!net.table.is_initialized());
    assert_eq!(net.logits(&[7, 8]), Net::<Plain>::new().logits(&[7, 8]));
}

#[test]
fn the_first_error_ends_the_encoding() {
    let mut count = 0;
    let error = encoded::<Flex, _, _>(Net::<Plain>::new(), |candidate| {
        count += 1;
        if candidate.path == "table" { Ok(None) } else { Err(candidate.path.to_owned()) }
    });
    assert_eq!((error.unwrap_err().as_str(), count), ("layers.0.weight", 2));
}

#[test]
fn a_value_that_cannot_be_created_is_an_error() {
    let mut net = Net::<Plain>::new();
    net.layers[1].weight = Param::uninitialized(
        ParamId::new(),
        |_, _| panic!("the file is gone"),
        FlexDevice,
        false,
        [INNER, WIDTH].into(),
    );
    let error = encoded::<Flex, _, _>(net, |candidate| candidate.values().map(|_| None));
    assert_eq!(error.unwrap_err(), "the file is gone");
}
