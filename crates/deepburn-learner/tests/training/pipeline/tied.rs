//! Parameters that several stages read, whose gradients are added up on the last of them.

use deepburn_comm::{MessageCount, MessageDirection};

use super::*;

/// A table that is looked up on two stages and is the output layer, and a matrix that two stages
/// share.
#[derive(Module, Debug)]
struct SharedWeights<B: Backend> {
    table: Embedding<B>,
    shared: Linear<B>,
    middle: Linear<B>,
    last: Linear<B>,
}

impl SharedWeights<Trained> {
    fn new() -> Self {
        let device = &FlexDevice;
        let square = |seed| LinearConfig::new(WIDTH, WIDTH).init(device).map(&mut Fill(seed));
        Self {
            table: EmbeddingConfig::new(3 * VOCABULARY, WIDTH).init(device).map(&mut Fill(3)),
            shared: square(5),
            middle: square(7),
            last: square(9),
        }
    }
}

impl Loss for SharedWeights<Trained> {
    fn loss_of(&self, seed: usize) -> Tensor<Trained, 1> {
        let device = &self.table.weight.val().device();
        let tokens = |from: usize| {
            // Each sequence has a token twice, so that rows are added up.
            let tokens: Vec<i64> =
                (0..6).map(|i| ((seed * 7 + from + i % 5 * 3) % 33) as i64).collect();
            Tensor::<Trained, 2, Int>::from_data(TensorData::new(tokens, [2, 3]), device)
        };
        let source = self.shared.forward(self.table.forward(tokens(0))).tanh();
        let hidden = self.middle.forward(source);
        let target = self.table.forward(tokens(1));
        let hidden = self.shared.forward(self.last.forward(hidden + target).tanh());
        let logits = hidden.matmul(self.table.weight.val().transpose().unsqueeze());
        let likely = burn::tensor::activation::log_softmax(logits, 2);
        likely.gather(2, tokens(2).unsqueeze_dim::<3>(2)).mean().neg()
    }
}

/// The stages of [`SharedWeights`]: the table and the shared matrix are on the first and the last
/// one.
fn homes(stages: usize) -> PipelineLayout {
    let ends = Holders::of([0, stages - 1]);
    homes_of(stages, stages - 1, ends, ends)
}

/// The last of three stages has only the table.
fn table_alone(stages: usize) -> PipelineLayout {
    assert_eq!(stages, 3);
    homes_of(stages, 1, Holders::of([0, 2]), Holders::of([0, 1]))
}

fn homes_of(stages: usize, last: usize, table: Holders, shared: Holders) -> PipelineLayout {
    let middle = Holders::one(stages / 2);
    let own =
        [("table", table), ("shared", shared), ("middle", middle), ("last", Holders::one(last))];
    let mut paths = Paths::default();
    SharedWeights::new().visit(&mut paths);
    PipelineLayout::new(
        stages,
        paths.found.into_iter().map(|path| {
            let (_, homes) = own.iter().find(|(field, _)| path.starts_with(field)).unwrap();
            (path, *homes)
        }),
    )
}

/// The results of a rank: losses, norms and values, and the messages with activations and with
/// their gradients that it has sent.
struct Outcome {
    losses: Vec<Vec<f64>>,
    norms: Vec<Option<f64>>,
    values: Vec<Vec<u8>>,
    activations: MessageCount,
    gradients: MessageCount,
}

fn train_tied(
    shape: Shape,
    settings: &Value,
    schedule: PipelineSchedule,
    layout: impl Fn(usize) -> PipelineLayout + Sync,
) -> Vec<Outcome> {
    let plan = with_schedule(plan(shape, settings), schedule);
    let ranks = run_ranks(shape.stages * shape.ranks, Duration::from_secs(60), |member| {
        let group = Group::new(member.clone());
        let mut engine = match shape.stages {
            1 => initialize(SharedWeights::new(), &plan, group),
            stages => initialize_pipeline(SharedWeights::new(), &plan, layout(stages), group),
        }
        .map_err(Cause::from)?;
        let data = engine.states().data_group();
        let (rank, ranks, count) = (data.rank(), data.world_size(), shape.micro_batches);
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for step in 0..3 {
            let mut batches = SeededBatches { first: step * count, ranks, rank, count };
            let trained = engine.train_batch(&mut batches)?;
            losses.push(trained.losses);
            norms.push(trained.step.gradient_norm);
        }
        let statistics = member.statistics();
        let sent_as = |what: &str| {
            statistics.messages(MessageDirection::Send, |purpose| purpose.starts_with(what))
        };
        let (activations, gradients) = (sent_as("activation"), sent_as("gradient of activation"));
        let read = |index| {
            let data = engine.states().parameter_data(index);
            data.map(|data| data.as_bytes().to_vec()).map_err(deepburn_learner::EngineError::from)
        };
        let values = (0..engine.parameters().len()).map(read).collect::<Result<_, _>>()?;
        Ok::<_, Cause>(Outcome { losses, norms, values, activations, gradients })
    });
    ranks.unwrap_or_else(|failure| panic!("{shape:?}: {failure}"))
}

#[test]
fn gradients_of_shared_parameters_have_the_bits_of_one_stage() {
    use PipelineSchedule::{FillDrain, OneForwardOneBackward, ZeroBubbleH1};
    for (micro_batches, ranks, zero_stage) in
        [(1, 1, 0), (5, 1, 1), (3, 2, 0), (4, 2, 2), (3, 2, 3)]
    {
        let one = Shape { stages: 1, ranks, micro_batches };
        let settings = zero(zero_stage);
        let expected = train_tied(one, &settings, OneForwardOneBackward, homes).swap_remove(0);
        for (stages, schedule) in [
            (2, OneForwardOneBackward),
            (2, FillDrain),
            (2, ZeroBubbleH1),
            (3, OneForwardOneBackward),
            (4, OneForwardOneBackward),
            (4, FillDrain),
            (4, ZeroBubbleH1),
        ] {
            let shape = Shape { stages, ..one };
            for found in train_tied(shape, &settings, schedule, homes).iter().step_by(ranks) {
                let what = format!("{shape:?}, ZeRO {zero_stage}, {schedule:?}");
                assert_eq!(found.losses, expected.losses, "{what}");
                assert_eq!(found.norms, expected.norms, "{what}");
                assert_eq!(found.values, expected.values, "{what}");
            }
        }
    }
}

#[test]
fn rows_of_a_tied_table_are_sent_and_not_its_gradient() {
    let shape = Shape { stages: 2, ranks: 1, micro_batches: 4 };
    let ranks = train_tied(shape, &zero(0), PipelineSchedule::OneForwardOneBackward, homes);
    let (steps, f32) = (3 * shape.micro_batches, 4);
    // Stage 0 sends the rows of its 6 tokens, and the gradients of the shared matrix and bias.
    let (rows, shared) = (6 * WIDTH, WIDTH * WIDTH + WIDTH);
    assert_eq!(ranks[0].gradients.messages, 3 * steps as u64);
    assert_eq!(ranks[0].gradients.bytes, ((rows + shared) * f32 * steps) as u64);
    // Stage 1 sends the gradient of the activations, and of the shared matrix and bias.
    assert_eq!(ranks[1].gradients.bytes, ((6 * WIDTH + shared) * f32 * steps) as u64);
}

/// The output layer runs on the stage that the layout gives it, although its input is elsewhere and
/// the first stage holds the table, too.
#[test]
fn a_tied_table_is_not_sent_to_its_input() {
    let shape = Shape { stages: 3, ranks: 1, micro_batches: 4 };
    let schedule = PipelineSchedule::OneForwardOneBackward;
    let expected = train_tied(Shape { stages: 1, ..shape }, &zero(0), schedule, homes);
    let ranks = train_tied(shape, &zero(0), schedule, table_alone);
    for found in &ranks {
        assert_eq!(found.losses, expected[0].losses);
        assert_eq!(found.values, expected[0].values);
    }
    // In each micro-batch, stage 0 sends the activations of two lookups, and stage 1 the output of
    // one layer.
    let passes = (3 * shape.micro_batches) as u64;
    let hidden = (6 * WIDTH * 4) as u64;
    assert_eq!(ranks[0].activations.bytes, 2 * hidden * passes);
    assert_eq!(ranks[1].activations.bytes, hidden * passes);
    let table = (3 * VOCABULARY * WIDTH * 4) as u64;
    for rank in &ranks {
        assert!(rank.gradients.bytes < table * passes, "{:?}", rank.gradients);
    }
}

/// A stage that waited for rows of a pass that the first stage cannot end yet would wait forever:
/// the first stage waits for the value of a later micro-batch.
#[test]
fn a_loss_may_be_read_in_the_forward_pass() {
    struct Reading(SeededBatches);
    impl MicroBatches<Flex, SharedWeights<Trained>> for Reading {
        fn loss(
            &mut self,
            model: &SharedWeights<Trained>,
            index: usize,
        ) -> Result<Tensor<Trained, 1>, Cause> {
            let loss = self.0.loss(model, index)?;
            assert!(loss.clone().inner().into_scalar() > 0.0);
            Ok(loss)
        }

        fn weight(&self, _index: usize) -> f64 {
            1.0 / 7.0
        }
    }
    use PipelineSchedule::{FillDrain, OneForwardOneBackward, ZeroBubbleH1};
    for schedule in [OneForwardOneBackward, FillDrain, ZeroBubbleH1] {
        let plan = plan(Shape { stages: 5, ranks: 1, micro_batches: 7 }, &zero(0));
        let plan = with_schedule(plan, schedule);
        let losses = run_ranks(5, Duration::from_secs(60), |member| {
            let group = Group::new(member);
            let engine = initialize_pipeline(SharedWeights::new(), &plan, homes(5), group);
            let mut engine = engine.map_err(Cause::from)?;
            let batches = SeededBatches { first: 0, ranks: 1, rank: 0, count: 7 };
            Ok::<_, Cause>(engine.train_batch(&mut Reading(batches))?.losses)
        });
        let losses = losses.unwrap_or_else(|failure| panic!("{schedule:?}: {failure}"));
        assert!(losses.iter().all(|it| it.len() == 7 && *it == losses[0]), "{losses:?}");
    }
}
