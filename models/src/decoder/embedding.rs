//! The token embedding with its adapter, and the head.
//!
//! ```text
//! embedding    W[ids]       with an adapter  W[ids] + s A[ids] B        A: [vocab, r], B: [r, width]
//! head         x W^T
//! ```

use burn::module::{Module, Param};
use burn::tensor::{Int, Tensor, backend::Backend};

use crate::weights::WeightInit;

/// The token embedding.
#[derive(Module, Debug)]
pub(super) struct Embedding<B: Backend> {
    /// A row for each token, `[vocab, width]`.
    pub(super) weight: Param<Tensor<B, 2>>,
    /// The adapter of looked-up rows. A tied head does not have it.
    adapter: Option<TableAdapter<B>>,
}

/// An output projection of its own, separate from the token embedding.
#[derive(Module, Debug)]
pub(super) struct Head<B: Backend> {
    /// The projection, `[vocab, width]`.
    weight: Param<Tensor<B, 2>>,
}

/// The adapter of a table of tokens.
#[derive(Module, Debug)]
struct TableAdapter<B: Backend> {
    a: Param<Tensor<B, 2>>,
    b: Param<Tensor<B, 2>>,
    #[module(skip)]
    scale: f64,
}

impl<B: Backend> TableAdapter<B> {
    /// Returns the adapter of the table at module path `path`, if it has one.
    fn new(init: &WeightInit<B>, path: &str) -> Option<Self> {
        let shape = init.adapter(path)?;
        let at = |leaf: &str| format!("{path}.adapter.{leaf}");
        Some(Self { a: init.param(&at("a")), b: init.param(&at("b")), scale: shape.scale })
    }
}

impl<B: Backend> Embedding<B> {
    /// Returns the embedding at module path `path`.
    pub(super) fn new(init: &WeightInit<B>, path: &str) -> Self {
        let weight = init.param(&format!("{path}.weight"));
        Self { weight, adapter: TableAdapter::new(init, path) }
    }

    /// Returns the rows of the tokens `[batch, length]`, of shape `[batch, length, width]`.
    pub(super) fn forward(&self, ids: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        let rows =
            |table: &Param<Tensor<B, 2>>, ids| burn::tensor::module::embedding(table.val(), ids);
        let Some(adapter) = &self.adapter else { return rows(&self.weight, ids) };
        let [batch, length] = ids.dims();
        let factors = rows(&adapter.a, ids.clone()).flatten::<2>(0, 1);
        let added = (factors * adapter.scale).matmul(adapter.b.val());
        let width = added.dims()[1];
        rows(&self.weight, ids) + added.reshape([batch, length, width])
    }
}

impl<B: Backend> Head<B> {
    /// Returns the head at module path `path`; `None` if it is tied to the embedding.
    pub(super) fn new(init: &WeightInit<B>, path: &str) -> Option<Self> {
        init.optional_param(&format!("{path}.weight")).map(|weight| Self { weight })
    }

    /// Returns the projection, `[vocab, width]`.
    pub(super) fn weight(&self) -> Tensor<B, 2> {
        self.weight.val()
    }
}
