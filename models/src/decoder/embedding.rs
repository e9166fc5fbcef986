//! The token embedding with its adapter, and the head.
//!
//! ```text
//! embedding    W[ids]       with an adapter  W[ids] + s A[ids] B        A: [vocab, r], B: [r, width]
//! head         x W^T
//! ```
//!
//! Single rows of `W` can be trained while the others are frozen. A tied head has the same trained
//! rows.

use burn::module::{Module, Param};
use burn::tensor::{IndexingUpdateOp, Int, Tensor, TensorData, backend::Backend};

use crate::weights::WeightInit;

/// The token embedding.
#[derive(Module, Debug)]
pub(super) struct Embedding<B: Backend> {
    /// A row for each token, `[vocab, width]`.
    pub(super) weight: Param<Tensor<B, 2>>,
    /// The adapter of looked-up rows. A tied head does not have it.
    adapter: Option<TableAdapter<B>>,
    /// The trained rows.
    tokens: Option<TrainedRows<B>>,
}

/// An output projection of its own, separate from the token embedding.
#[derive(Module, Debug)]
pub(super) struct Head<B: Backend> {
    /// The projection, `[vocab, width]`.
    weight: Param<Tensor<B, 2>>,
    /// The trained rows.
    tokens: Option<TrainedRows<B>>,
}

/// Rows that replace the rows of some tokens in a frozen table.
#[derive(Module, Debug)]
struct TrainedRows<B: Backend> {
    /// `[tokens, width]`.
    rows: Param<Tensor<B, 2>>,
    /// The different tokens.
    #[module(skip)]
    tokens: Vec<i64>,
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

impl<B: Backend> TrainedRows<B> {
    /// Returns the trained rows of the table at module path `path`, if it has any.
    fn new(init: &WeightInit<B>, path: &str) -> Option<Self> {
        let tokens = init.trained_tokens(path)?.iter().map(|token| *token as i64).collect();
        Some(Self { rows: init.param(&format!("{path}.tokens.rows")), tokens })
    }

    /// Returns the tokens, `[tokens]`.
    fn tokens(&self, device: &B::Device) -> Tensor<B, 1, Int> {
        Tensor::from_data(TensorData::from(&self.tokens[..]), device)
    }

    /// Replaces the rows of the tokens in `embedded`, `[batch, length, width]`, which were looked
    /// up for `ids`.
    fn replaced_in(&self, embedded: Tensor<B, 3>, ids: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        let ([batch, length, width], count) = (embedded.dims(), self.tokens.len());
        let tokens = self.tokens(&embedded.device()).reshape([1, count]);
        let ids = ids.reshape([batch * length, 1]).expand([batch * length, count]);
        // A row has at most one 1, so that the product is an exact copy.
        let one_hot = ids.equal(tokens.expand([batch * length, count])).float();
        let one_hot = one_hot.cast(embedded.dtype());
        let keep = one_hot.clone().sum_dim(1).neg() + 1.0;
        let kept = embedded.reshape([batch * length, width]) * keep;
        let rows = self.rows.val().cast(kept.dtype());
        (kept + one_hot.matmul(rows)).reshape([batch, length, width])
    }

    /// Replaces the rows of the tokens in a table, `[vocab, width]`.
    fn replaced_in_table(&self, table: Tensor<B, 2>) -> Tensor<B, 2> {
        let (device, dtype) = (table.device(), table.dtype());
        let (tokens, [vocab, _]) = (self.tokens(&device), table.dims());
        let ones = |rows: usize| Tensor::<B, 2>::ones([rows, 1], (&device, dtype));
        // Rows are added to zeros, which is exact.
        let add = IndexingUpdateOp::Add;
        let count = self.tokens.len();
        // The old rows are cleared first, by a factor of 1 - 1.
        let keep = ones(vocab).select_assign(0, tokens.clone(), ones(count).neg(), add);
        (table * keep).select_assign(0, tokens, self.rows.val().cast(dtype), add)
    }
}

/// Returns the values of a table with its trained rows, `[vocab, width]`.
fn whole<B: Backend>(
    weight: &Param<Tensor<B, 2>>,
    tokens: Option<&TrainedRows<B>>,
) -> Tensor<B, 2> {
    match tokens {
        Some(tokens) => tokens.replaced_in_table(weight.val()),
        None => weight.val(),
    }
}

impl<B: Backend> Embedding<B> {
    /// Returns the embedding at module path `path`.
    pub(super) fn new(init: &WeightInit<B>, path: &str) -> Self {
        let weight = init.param(&format!("{path}.weight"));
        Self {
            weight,
            adapter: TableAdapter::new(init, path),
            tokens: TrainedRows::new(init, path),
        }
    }

    /// Returns the output projection of a tied head, `[vocab, width]`.
    pub(super) fn as_head(&self) -> Tensor<B, 2> {
        whole(&self.weight, self.tokens.as_ref())
    }

    /// Returns the rows of the tokens `[batch, length]`, of shape `[batch, length, width]`.
    pub(super) fn forward(&self, ids: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        let rows =
            |table: &Param<Tensor<B, 2>>, ids| burn::tensor::module::embedding(table.val(), ids);
        // A table has trained rows or factors; `Adapter` refuses both, as PEFT does.
        if let Some(tokens) = &self.tokens {
            return tokens.replaced_in(rows(&self.weight, ids.clone()), ids);
        }
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
        let weight = init.optional_param(&format!("{path}.weight"))?;
        Some(Self { weight, tokens: TrainedRows::new(init, path) })
    }

    /// Returns the projection, `[vocab, width]`.
    pub(super) fn weight(&self) -> Tensor<B, 2> {
        whole(&self.weight, self.tokens.as_ref())
    }
}
