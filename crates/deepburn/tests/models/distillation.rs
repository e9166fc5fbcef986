//! A teacher that only evaluates and a student with dropout: two engines on each rank's thread.

use burn::module::Module;
use burn::nn::loss::{KLDivLossConfig, Reduction};
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::activation::{log_softmax, relu, softmax};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};
use deepburn::zero::Category;
use deepburn::{BoxError, EngineError, run_ranks};

use crate::harness::Precision::{self, Bf16, Fp16, Fp32};
use crate::harness::{Evaluation, Job, STEPS, Trained, Trainer};
use crate::samples::Samples;
use crate::weights::{Seeded, values};

const FEATURES: usize = 5;
const CLASSES: usize = 4;

#[derive(Module, Debug)]
struct Classifier<B: Backend> {
    up: Linear<B>,
    norm: BatchNorm<B>,
    dropout: Dropout,
    down: Linear<B>,
}

impl<B: Backend> Classifier<B> {
    fn new(inner: usize, dropout: f64, seed: u64) -> Self {
        let device = &B::Device::default();
        let model = Self {
            up: LinearConfig::new(FEATURES, inner).init(device),
            norm: BatchNormConfig::new(inner).init(device),
            dropout: DropoutConfig::new(dropout).init(),
            down: LinearConfig::new(inner, CLASSES).init(device),
        };
        model.map(&mut Seeded::new(seed))
    }

    fn logits(&self, samples: &Samples) -> Tensor<B, 2> {
        let x = self.norm.forward(self.up.forward(samples.floats(&[FEATURES])));
        self.down.forward(self.dropout.forward(relu(x)))
    }

    /// Returns the divergence from the teacher's predictions.
    fn loss(&self, samples: &Samples, taught: TensorData) -> Tensor<B, 1> {
        let taught = softmax(Tensor::from_data(taught, &B::Device::default()), 1);
        let answers = log_softmax(self.logits(samples), 1);
        KLDivLossConfig::new().init().forward(answers, taught, Reduction::BatchMean)
    }
}

type Engine = Trainer<Classifier<Trained>>;

/// The result of training a student.
struct Student {
    losses: Vec<f32>,
    evaluation: Evaluation,
    /// The peak of the activations in bytes.
    activations: usize,
}

#[track_caller]
fn assert_same(left: &[Student], right: &[Student], what: &str) {
    for (rank, (left, right)) in left.iter().zip(right).enumerate() {
        let what = format!("{what}, rank {rank}");
        assert_eq!(left.losses, right.losses, "{what}");
        left.evaluation.assert_same(&right.evaluation, &what);
    }
}

/// Trains `student` on the logits that `teach` returns.
fn learn(
    student: &mut Engine,
    mut teach: impl FnMut(&Samples) -> Result<TensorData, EngineError>,
) -> Result<Student, EngineError> {
    let (rank, world_size) = (student.rank(), student.group().world_size());
    // The peaks must not include the construction of the models.
    student.ledger().reset_peaks();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let samples = Samples::of_step(step as u64, rank, world_size);
        let taught = teach(&samples)?;
        let loss = student.forward(|student| student.loss(&samples, taught))?;
        losses.push(loss.clone().into_scalar());
        student.backward(loss)?;
        student.step()?;
    }
    let activations = student.ledger().usage(Category::Activations).peak;
    let evaluation = student.evaluate(|student| Evaluation {
        loss: student.logits(&Samples::held_out()).abs().mean().into_scalar(),
        values: values(student),
    })?;
    Ok(Student { losses, evaluation, activations })
}

fn answers(teacher: &Engine, samples: &Samples) -> Result<TensorData, EngineError> {
    teacher.evaluate(|teacher| teacher.logits(samples).into_data().convert::<f32>())
}

/// Returns a wide teacher, which runs in fp32 for any precision of the student.
fn teacher_of(job: Job) -> (Job, impl Fn() -> Classifier<Trained> + Sync) {
    (Job { precision: Fp32, ..job }, || Classifier::new(40, 0.1, 8))
}

/// Trains a student on the same thread as its teacher, whose engine is created second.
fn together(job: Job) -> Vec<Student> {
    let (teaching, new_teacher) = teacher_of(job);
    let (plan, teacher_plan) = (job.plan(), teaching.plan());
    let ranks = run_ranks(job.ranks, |group| {
        let mut student = deepburn::initialize(Classifier::new(6, 0.3, 1), &plan, group.clone())?;
        let mut teacher = deepburn::initialize(new_teacher(), &teacher_plan, group)?;
        // The initialization of the teacher has advanced the random stream.
        student.seed(21);
        teacher.seed(22);
        Ok(learn(&mut student, |samples| answers(&teacher, samples))?)
    });
    ranks.unwrap_or_else(|failure| panic!("{job:?}: {failure}"))
}

/// Trains a student without a teacher on its thread, on recorded logits.
fn alone(job: Job) -> Vec<Student> {
    let (teaching, new_teacher) = teacher_of(job);
    let (plan, teacher_plan) = (job.plan(), teaching.plan());
    let recorded = run_ranks(job.ranks, |group| {
        let (rank, world_size) = (group.rank(), group.world_size());
        let teacher = deepburn::initialize(new_teacher(), &teacher_plan, group)?;
        let steps = 0..STEPS as u64;
        let samples = steps.map(|step| Samples::of_step(step, rank, world_size));
        let recorded = samples.map(|samples| Ok(answers(&teacher, &samples)?));
        recorded.collect::<Result<Vec<TensorData>, BoxError>>()
    });
    let recorded = recorded.unwrap_or_else(|failure| panic!("{job:?}: {failure}"));
    let ranks = run_ranks(job.ranks, |group| {
        let mut recorded = recorded[group.rank()].iter().cloned();
        let mut student = deepburn::initialize(Classifier::new(6, 0.3, 1), &plan, group)?;
        student.seed(21);
        Ok(learn(&mut student, |_| Ok(recorded.next().expect("an answer a step")))?)
    });
    ranks.unwrap_or_else(|failure| panic!("{job:?}: {failure}"))
}

/// Asserts that losses, weights and the memory of the student do not change if a teacher runs on
/// the same thread.
fn the_teacher_leaves_the_student_alone(precision: Precision) {
    for ranks in [1, 3] {
        let runs = [0, 1, 2, 3].map(|stage| {
            let job = Job::new(precision, stage, ranks);
            let [together, alone] = [together(job), alone(job)];
            assert_same(&together, &alone, &format!("{job:?}"));
            for (together, alone) in together.iter().zip(&alone) {
                assert_eq!(together.activations, alone.activations, "bytes, {job:?}");
            }
            together
        });
        for (stage, run) in runs.iter().enumerate() {
            assert_same(run, &runs[0], &format!("{precision:?}, stage {stage}"));
        }
    }
}

#[test]
fn a_teacher_leaves_an_fp32_student_alone() {
    the_teacher_leaves_the_student_alone(Fp32);
}

#[test]
fn a_teacher_leaves_a_bf16_student_alone() {
    the_teacher_leaves_the_student_alone(Bf16);
}

#[test]
fn a_teacher_leaves_an_fp16_student_alone() {
    the_teacher_leaves_the_student_alone(Fp16);
}
