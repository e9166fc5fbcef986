//! Micro-batches of labeled texts, of a fixed size or with dynamic batching.
//!
//! Main type: [`TextSource`], the data loader of one rank. With dynamic batching, a micro-batch has
//! as many texts as fit in a token budget. So the number of samples differs between steps, and the
//! learning rate can be scaled by it.

use std::sync::Arc;

use deepburn::{
    Batch, BatchSource, BoxError, EvaluationStream, NextStep, StepBatches, StepSize, schedule,
};
use deepburn_config::{CurriculumPlan, DynamicBatchingPlan, LrScaling, PickingOrderPlan, Plan};
use deepburn_datasets::{
    BatchLoader, BudgetSampler, Collate, DataError, DataShard, DistributedSampler, EpochPosition,
    LabeledBatch, LabeledTexts, PickingOrder, Position, StepShape, TokenBudget,
};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::data::lengths::{PREFETCH, longest};
use crate::data::recipe::RecipeSettings;

/// A micro-batch of texts.
pub(crate) struct Labeled(pub(crate) LabeledBatch);

impl Batch for Labeled {
    /// Returns the tokens of all texts, without padding.
    fn num_tokens(&self) -> usize {
        self.0.num_tokens()
    }

    /// Counts the texts with a label. The loss of a batch is weighted by this number.
    fn num_targets(&self) -> usize {
        self.0.num_texts()
    }
}

/// The data loader of one rank.
///
/// It assembles batches in advance on its own thread. Without dynamic batching, rank r of W takes
/// the texts r, r + W, r + 2W and so on of the shuffled order, as PyTorch's `DistributedSampler`
/// does.
pub(crate) struct TextSource {
    /// Micro-batches for training.
    loader: Loader,
    /// The texts of an evaluation.
    eval: Option<Arc<LabeledTexts>>,
    /// The rank and the number of ranks.
    shard: DataShard,
    /// The budget of an evaluation batch.
    budget: TokenBudget,
    /// The maximum number of texts of an evaluation.
    eval_max_samples: Option<usize>,
    /// The maximum length of texts by step.
    curriculum: Option<CurriculumPlan>,
}

/// The training batches.
enum Loader {
    /// Micro-batches of a fixed number of texts.
    Fixed(BatchLoader<LabeledTexts>),
    /// Dynamic batching.
    Budget {
        /// Assembles the batches that the sampler has planned.
        loader: BatchLoader<LabeledTexts, BudgetSampler>,
        /// How the learning rate is scaled by the number of samples.
        lr_scaling: LrScaling,
        /// Number of samples of a step for which the learning rate is not scaled.
        reference: usize,
    },
}

impl TextSource {
    /// Starts the data loader of `shard` with the batches of `plan`.
    ///
    /// # Errors
    /// Returns an error if a text exceeds the token budget of dynamic batching, if there are more
    /// ranks than texts, or if the thread cannot be started.
    pub(crate) fn new(
        train: Arc<LabeledTexts>,
        eval: Option<Arc<LabeledTexts>>,
        shard: DataShard,
        plan: &Plan,
        settings: &RecipeSettings,
    ) -> Result<Self, DataError> {
        let rows = plan.batch.micro_batch_size;
        let loader = match &plan.data_efficiency.dynamic_batching {
            Some(dynamic) => {
                let accumulation = plan.batch.gradient_accumulation_steps;
                let lengths = train.lengths();
                let sampler = BudgetSampler::new(lengths, budget(dynamic), shard, accumulation)?;
                Loader::Budget {
                    loader: BatchLoader::drawing(train, sampler, PREFETCH)?,
                    lr_scaling: dynamic.lr_scaling,
                    // As in DeepSpeed, the configured learning rate is the one of a step with this
                    // many samples.
                    reference: plan.batch.train_batch_size,
                }
            }
            None => {
                let sampler = DistributedSampler::new(train.len(), shard, settings.order)?;
                Loader::Fixed(BatchLoader::start(train, sampler, rows, PREFETCH)?)
            }
        };
        let budget = evaluation_budget(plan, settings.eval_batch_size(plan));
        let eval_max_samples = settings.evaluation.eval_max_samples;
        let curriculum = plan.data_efficiency.curriculum.clone();
        Ok(Self { loader, eval, shard, budget, eval_max_samples, curriculum })
    }
}

/// Returns the token budget of a plan.
///
/// `sequence_picking_order` is a trade-off: batches of texts of similar length need the least
/// padding, but their order is less random. `dataloader` takes the texts in the order of the data
/// set, the same in every epoch.
pub(crate) fn budget(plan: &DynamicBatchingPlan) -> TokenBudget {
    TokenBudget {
        max_tokens: plan.max_tokens,
        min_batch_size: plan.min_batch_size,
        max_batch_size: plan.max_batch_size,
        order: match plan.order {
            PickingOrderPlan::Dataloader => PickingOrder::Sequential,
            PickingOrderPlan::Random { seed } => PickingOrder::Random { seed },
            PickingOrderPlan::Seqlen => PickingOrder::ByLength,
        },
    }
}

impl BatchSource<Labeled> for TextSource {
    /// Returns the batches of a step. With dynamic batching, the result also has the number of
    /// samples of the step over all ranks, and the factor of its learning rate.
    fn next_step(&mut self, next: NextStep) -> Result<StepBatches<Labeled>, BoxError> {
        let length = longest(self.curriculum.as_ref(), next);
        // Read the size of the next step first: after its batches have been taken, the sampler is
        // at the step after it.
        let size = match &self.loader {
            Loader::Fixed(_) => None,
            Loader::Budget { loader, lr_scaling, reference } => {
                let samples = loader.sampler().step_samples();
                let lr_factor = schedule::lr_factor(*lr_scaling, samples, *reference);
                Some(StepSize { samples: samples as u64, lr_factor })
            }
        };
        // All ranks have the same number of micro-batches, but not of texts.
        let batches = (0..next.micro_batches).map(|_| {
            let mut batch = match &mut self.loader {
                Loader::Fixed(loader) => loader.next_batch()?,
                Loader::Budget { loader, .. } => loader.next_batch()?,
            };
            // Texts are truncated after they have been loaded, so that data-loader positions do not
            // depend on the curriculum.
            batch.truncate(length);
            Ok(Labeled(batch))
        });
        Ok(StepBatches { micro_batches: batches.collect::<Result<_, DataError>>()?, size })
    }

    /// Starts an evaluation. Only one batch of the stream is in memory at a time.
    fn evaluation(&mut self) -> Result<Option<EvaluationStream<'_, Labeled>>, BoxError> {
        let (shard, budget, limit) = (self.shard, self.budget, self.eval_max_samples);
        let eval = self.eval.as_ref();
        Ok(eval.map(|eval| evaluation(eval, shard, budget, limit)).transpose()?)
    }

    /// Returns the data-loader position as JSON, for the checkpoint. Its fields depend on whether
    /// dynamic batching is enabled.
    fn position(&self) -> Value {
        match &self.loader {
            Loader::Fixed(loader) => json!(loader.position()),
            Loader::Budget { loader, .. } => json!(loader.position()),
        }
    }

    /// Seeks to a position without loading the batches before it.
    ///
    /// # Errors
    /// Returns an error if the position does not exist in this data, or if dynamic batching was
    /// enabled or disabled since the checkpoint.
    fn seek(&mut self, position: &Value) -> Result<(), BoxError> {
        // Positions of the two loaders have different fields, so a position of the other loader
        // cannot be parsed.
        let other = |cause: serde_json::Error| {
            format!(
                "dynamic batching was enabled or disabled since the checkpoint ({cause}); set it back"
            )
        };
        match &mut self.loader {
            Loader::Fixed(loader) => {
                loader.seek(Position::deserialize(position).map_err(other)?)?;
            }
            Loader::Budget { loader, .. } => {
                loader.seek(EpochPosition::deserialize(position).map_err(other)?)?;
            }
        }
        Ok(())
    }
}

/// Returns the token budget of an evaluation batch, of `rows` texts without dynamic batching. Texts
/// are sorted by length, because their order does not matter.
pub(crate) fn evaluation_budget(plan: &Plan, rows: usize) -> TokenBudget {
    let budget = match &plan.data_efficiency.dynamic_batching {
        Some(dynamic) => budget(dynamic),
        None => TokenBudget { max_batch_size: Some(rows), ..TokenBudget::new(usize::MAX) },
    };
    TokenBudget { min_batch_size: 1, order: PickingOrder::ByLength, ..budget }
}

/// Returns the batches of one rank in an evaluation of the first `limit` texts. A batch has texts
/// of similar length, so that there is little padding.
///
/// # Errors
/// Returns an error if the split has no texts.
pub(crate) fn evaluation(
    texts: &LabeledTexts,
    shard: DataShard,
    budget: TokenBudget,
    limit: Option<usize>,
) -> Result<EvaluationStream<'_, Labeled>, DataError> {
    let mut lengths = texts.lengths();
    lengths.truncate(limit.unwrap_or(lengths.len()).max(1));
    // Texts for evaluation may be longer than those for training.
    let longest = lengths.iter().copied().max().unwrap_or(0).max(1);
    let budget = TokenBudget { max_tokens: budget.max_tokens.max(longest), ..budget };
    // Every rank plans the batches of all ranks and takes its own.
    let shape = StepShape { num_ranks: shard.num_ranks, accumulation: 1 };
    let plan = budget.plan(&lengths, shape, 0)?;
    Ok(Box::new((0..plan.num_batches()).map(move |index| {
        let samples = plan.batch(shard.rank, index);
        Ok(Labeled(texts.collate(samples, samples.len().max(1))?))
    })))
}
