//! Checks that a backend decorator of another crate runs below an unchanged model of Burn 0.23, and
//! gets each gradient as soon as it is final. `README.md` says why.

mod hook;
mod ops;
mod probe;

use std::time::Instant;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Distribution, Tensor, activation};
use burn_autodiff::Autodiff;
use burn_backend::AutodiffBackend;
use burn_flex::{Flex, FlexDevice};
use burn_group::{GroupBackend, GroupDevice};

use hook::{Reported, mark, reported};
use probe::{Probe, products};

/// A user's model, which knows nothing of the decorator.
#[derive(Module, Debug)]
struct Perceptron {
    up: Linear,
    down: Linear,
}

impl Perceptron {
    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let y = self.down.forward(activation::relu(self.up.forward(x.clone())));
        (y - x).powf_scalar(2.0).mean()
    }
}

fn main() {
    let group = GroupDevice::new::<Probe<Flex>>(&[FlexDevice]).expect("a group of one device");
    // A model sees a device like any other; nothing in its types names the decorator.
    let device = Device::from(group).autodiff();
    let model = Perceptron {
        up: LinearConfig::new(16, 64).init(&device),
        down: LinearConfig::new(64, 16).init(&device),
    };
    let x = Tensor::<2>::random([8, 16], Distribution::Default, &device);

    let loss = mark(model, &device).loss(x.clone());
    let Ok(loss) = loss.try_into_primitive::<Autodiff<GroupBackend>>() else {
        panic!("the loss is not on the group")
    };
    let forward = products();
    let _ = <Autodiff<GroupBackend> as AutodiffBackend>::backward(loss);
    let (all, gradients) = (products(), reported());
    println!("{forward} products in forward, {} in backward", all - forward);
    for Reported { parameter, products } in &gradients {
        println!("  gradient of parameter {parameter} after {} of them", products - forward);
    }
    // The input of the model needs no gradient.
    assert_eq!((forward, all), (2, 5), "the products do not pass through the decorator");
    // Two weights and two biases.
    assert_eq!(gradients.len(), 4, "a gradient was not reported");
    // Overlap of communication and backward needs gradients before the last product.
    let early = gradients.iter().filter(|reported| reported.products < all).count();
    assert!(early > 0, "all gradients come at the end of backward");

    // A tiny tensor, so that the time is the group's overhead and not arithmetic.
    let (started, count) = (Instant::now(), 10_000);
    let y = (0..count).fold(x.without_autodiff(), |y, _| y + 1.0);
    println!("{:.1?} per small op through the group", started.elapsed() / count);
    // The result is read, so that an op that failed is noticed.
    drop(y.into_data());
}
