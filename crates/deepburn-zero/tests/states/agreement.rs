//! Ranks that hold different values of one parameter are found, whatever parameter it is.

use std::time::Duration;

use burn::tensor::TensorData;
use burn_flex::Flex;
use deepburn_comm::run_ranks;
use deepburn_config::Stage;
use deepburn_zero::{Group, ModelStates, Rates, StateSegment, ZeroError};

use crate::model::{Net, Trained, policy, rows};

/// Returns the error that ends three ranks, of which the last one has other values of `changed`. As
/// many steps are taken as there are parameters. Every rank has to return the same.
fn disagreement(stage: Stage, changed: &str) -> Option<String> {
    let ranks = run_ranks(3, Duration::from_secs(60), |member| {
        let group = Group::<Flex>::new(member);
        let rank = group.rank();
        let (mut net, mut states) =
            ModelStates::shard(Net::<Trained>::new(), policy(stage), group)?;
        let read = |segment: &StateSegment<'_>| {
            let value: f32 = if rank == 2 { 0.5 } else { 0.25 };
            let len = segment.range.len();
            Ok::<_, ZeroError>(TensorData::new(vec![value; len], [len]))
        };
        states.load_weights(|path| path == changed, read)?;
        for step in 0..states.parameters().len() {
            net = states.start_training_pass(net)?;
            let loss = net.loss(&rows(4, step as u64));
            states.start_backward();
            drop(loss.backward());
            states.finish_pass()?;
            if let Err(error) = states.step(Rates { lr: 1e-3, betas: None }, 1.0, None) {
                return Ok(Some(error.to_string()));
            }
        }
        Ok::<_, ZeroError>(None)
    })
    .unwrap();
    assert!(ranks.windows(2).all(|pair| pair[0] == pair[1]), "{ranks:?}");
    ranks.into_iter().next().flatten()
}

#[test]
fn a_parameter_that_differs_on_one_rank_ends_all_ranks() {
    // At stages 1 and 2, a rank loads only its part of a trained parameter, and all get the others.
    for (stage, changed) in [
        (Stage::Disabled, "norm.gamma"),
        (Stage::Disabled, "frozen.weight"),
        (Stage::OptimizerStates, "frozen.weight"),
        (Stage::Gradients, "frozen.weight"),
    ] {
        let error = disagreement(stage, changed);
        let expected = format!("parameter {changed} has other values on ranks [2] than on rank 0");
        assert!(error.as_deref().is_some_and(|it| it.starts_with(&expected)), "{error:?}");
    }
}

#[test]
fn shards_have_nothing_to_agree_on() {
    assert_eq!(disagreement(Stage::Parameters, "frozen.weight"), None);
}
