//! Measures the overhead of the backend decorators in a training pass of a tiny model.
//!
//! ```sh
//! cargo bench --workspace --bench decorator_step -- [--json] [--rounds 31]
//! ```
//!
//! The benchmark alternates between forward and backward of a perceptron on `Flex` and on
//! `Zero<Flex>`, with the same matrix products (`MatmulOps`). The model has one rank and nothing is
//! sharded, but each op passes through autocast and the ledger. The gradients are computed by hand,
//! because Burn's autodiff needs a backend that can exchange gradients, which plain flex cannot.
//! Autodiff would add the same time to both sides, so the ratio of a real training pass is smaller.
//! The ratio compares medians. `--json` prints one object per line: `name`, `unit`, `value`,
//! `spread` (first and third quartile of the ratios of single rounds).

use std::env;
use std::error::Error;
use std::hint::black_box;
use std::time::{Duration, Instant};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Tensor, TensorPrimitive};
use burn_flex::{Flex, FlexDevice};
use deepburn_comm::run_ranks;
use deepburn_config::Stage;
use deepburn_ops::MatmulOps;
use deepburn_zero::{Group, ModelStates, Pass, Training, Zero, ZeroError};

#[path = "../tests/model/mod.rs"]
mod model;

/// The number of passes in a round.
const PASSES: usize = 20;

/// A model, because ops of `Zero` are counted in the ledger of a model.
#[derive(Module, Debug)]
struct Owner<B: Backend> {
    layer: Linear<B>,
}

/// The matrix product that the sharding decorator calls. Burn's own product on flex has a different
/// speed.
trait Products: Backend {
    fn product(left: Tensor<Self, 2>, right: Tensor<Self, 2>) -> Tensor<Self, 2>;
}

impl Products for Flex {
    fn product(left: Tensor<Self, 2>, right: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let [left, right] = [left, right].map(|operand| operand.into_primitive().tensor());
        Tensor::from_primitive(TensorPrimitive::Float(Self::matmul(left, right)))
    }
}

impl Products for Zero<Flex> {
    fn product(left: Tensor<Self, 2>, right: Tensor<Self, 2>) -> Tensor<Self, 2> {
        left.matmul(right)
    }
}

/// A perceptron with one hidden layer, and its input rows.
struct Perceptron<B: Backend> {
    input: Tensor<B, 2>,
    up: Tensor<B, 2>,
    down: Tensor<B, 2>,
}

impl<B: Products> Perceptron<B> {
    fn new(rows: usize, width: usize) -> Self {
        let random =
            |shape| Tensor::random(shape, Distribution::Uniform(-1.0, 1.0), &B::Device::default());
        Self {
            input: random([rows, width]),
            up: random([width, 4 * width]),
            down: random([4 * width, width]),
        }
    }

    /// Returns a perceptron with the values of another one. The time of an activation function
    /// depends on its operand.
    fn like<C: Products>(other: &Perceptron<C>) -> Self {
        let copy = |tensor: &Tensor<C, 2>| Tensor::from_data(tensor.to_data(), &Default::default());
        Self { input: copy(&other.input), up: copy(&other.up), down: copy(&other.down) }
    }

    /// Returns the gradients of the mean square of the output.
    fn gradients(&self) -> [Tensor<B, 2>; 3] {
        let before = B::product(self.input.clone(), self.up.clone());
        let hidden = before.clone().tanh();
        let output = B::product(hidden.clone(), self.down.clone());
        let count = output.shape().num_elements() as f64;
        let of_output = output * (2.0 / count);
        let of_down = B::product(hidden.clone().transpose(), of_output.clone());
        let of_hidden = B::product(of_output, self.down.clone().transpose());
        let slope = (hidden.clone() * hidden).neg() + 1.0;
        let of_before = of_hidden * slope;
        let of_up = B::product(self.input.clone().transpose(), of_before.clone());
        [of_down, of_up, B::product(of_before, self.up.clone().transpose())]
    }

    /// Returns the seconds of a forward and backward pass.
    fn seconds(&self) -> f64 {
        let began = Instant::now();
        for _ in 0..PASSES {
            black_box(self.gradients());
        }
        began.elapsed().as_secs_f64() / PASSES as f64
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1).filter(|argument| argument != "--bench");
    let (mut json, mut rounds) = (false, 31);
    while let Some(name) = arguments.next() {
        match name.as_str() {
            "--json" => json = true,
            "--rounds" => {
                let value = arguments.next().ok_or("--rounds needs a number")?;
                rounds = value.parse::<usize>()?.max(1);
            }
            _ => return Err(format!("unknown option {name}").into()),
        }
    }
    for (rows, width) in [(8, 8), (32, 64), (128, 128)] {
        let times = measure(rows, width, rounds)?;
        let [plain, decorated] =
            [0, 1].map(|side| quantile(times.iter().map(|pair| pair[side]).collect(), 0.5));
        let ratios: Vec<f64> = times.iter().map(|[plain, decorated]| decorated / plain).collect();
        let (ratio, low, high) =
            (decorated / plain, quantile(ratios.clone(), 0.25), quantile(ratios, 0.75));
        let name = format!("decorator_step_{rows}x{width}");
        match json {
            true => println!(
                r#"{{"name": "{name}", "unit": "ratio", "value": {ratio:.4}, "spread": [{low:.4}, {high:.4}]}}"#
            ),
            false => println!(
                "{name:24} flex {:9.1} us, decorated {:9.1} us, ratio {ratio:.3} ({low:.3} to {high:.3})",
                plain * 1e6,
                decorated * 1e6
            ),
        }
    }
    Ok(())
}

/// Returns the seconds of a pass on flex and through the decorators, for each round.
fn measure(rows: usize, width: usize, rounds: usize) -> Result<Vec<[f64; 2]>, Box<dyn Error>> {
    let measured = run_ranks(1, Duration::MAX, |member| {
        let owner = Owner::<Training<Flex>> { layer: LinearConfig::new(2, 2).init(&FlexDevice) };
        let policy = model::policy(Stage::Disabled);
        let (_owner, states) = ModelStates::shard(owner, policy, Group::<Flex>::new(member))?;
        let _context = states.enter(Some(Pass::Train));
        let plain = Perceptron::<Flex>::new(rows, width);
        let decorated = Perceptron::<Zero<Flex>>::like(&plain);
        let round = |_| [plain.seconds(), decorated.seconds()];
        // The first rounds warm up.
        Ok::<_, ZeroError>((0..rounds + 3).map(round).skip(3).collect::<Vec<_>>())
    });
    Ok(measured?.swap_remove(0))
}

fn quantile(mut values: Vec<f64>, at: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * at) as usize]
}
