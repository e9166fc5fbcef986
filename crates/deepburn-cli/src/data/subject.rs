//! The subject of a job: its model and its data.
//!
//! Main type: [`Subject`]. [`with_language_models`] lists the language models.
//!
//! A recipe is generic over the backend, which is chosen at run time, so a subject cannot be a trait object. Instead it
//! is an enum, and a [`RecipeVisitor`] is compiled for each pair of recipe and backend. Properties that do not depend
//! on the backend are in the trait [`SubjectInfo`].

use deepburn::ops::{FusedOps, OptimizerOps};
use deepburn_config::{Architecture, BatchPlan, DataKind, Job};
use deepburn_datasets::Order;
use deepburn_models::encoder::EncoderConfig;
use deepburn_models::gpt2::{ClassifierConfig, Gpt2Config};

use crate::data::causal::Causal;
use crate::data::classification::Classification;
use crate::data::places::Places;
use crate::data::recipe::{Recipe, SubjectInfo};
use crate::failure::Failure;
use crate::job::known_model::with_language_models;

/// A visitor of the recipe of any subject on backend `B`.
///
/// It stands for a generic closure, which Rust does not have.
pub(crate) trait RecipeVisitor<B: FusedOps + OptimizerOps> {
    /// The return type of the visit.
    type Output;

    /// Visits the recipe. The visitor is consumed, so that its fields can be moved.
    fn visit<R: Recipe<B>>(self, recipe: &R) -> Self::Output;
}

/// Defines [`Subject`] with a variant for each of these language models.
macro_rules! define_subject {
    ($($(#[$doc:meta])* $name:ident: $config:ty,)+) => {
        /// The model and the data of a job.
        pub(crate) enum Subject {
            $($(#[$doc])* $name(Box<Causal<$config>>),)+
            /// Text classification by an encoder.
            Encoder(Box<Classification<EncoderConfig>>),
            /// Text classification by GPT-2.
            Gpt2Classifier(Box<Classification<ClassifierConfig>>),
        }

        impl Subject {
            /// Reads and checks the model and the data of a job.
            ///
            /// # Errors
            /// Returns a user's mistake if the model or the data is invalid, or if they do not match.
            pub(crate) fn prepare(
                job: &Job,
                places: &Places,
                batch: BatchPlan,
                order: Order,
            ) -> Result<Self, Failure> {
                Ok(match (job.model.architecture, &job.data.kind) {
                    (Architecture::Encoder, _) => {
                        let subject = Classification::of_encoder(job, places, batch, order)?;
                        Self::Encoder(Box::new(subject))
                    }
                    (Architecture::Gpt2, DataKind::Classification { .. }) => {
                        let subject = Classification::of_gpt2(job, places, batch, order)?;
                        Self::Gpt2Classifier(Box::new(subject))
                    }
                    $((Architecture::$name, _) => {
                        Self::$name(Box::new(Causal::prepare(job, places, batch, order)?))
                    })+
                })
            }

            /// Returns the properties that do not depend on the backend.
            pub(crate) fn info(&self) -> &dyn SubjectInfo {
                match self {
                    $(Self::$name(subject) => &**subject,)+
                    Self::Encoder(subject) => &**subject,
                    Self::Gpt2Classifier(subject) => &**subject,
                }
            }

            /// Calls `visitor` with the recipe.
            pub(crate) fn visit<B: FusedOps + OptimizerOps, V: RecipeVisitor<B>>(
                &self,
                visitor: V,
            ) -> V::Output {
                match self {
                    $(Self::$name(subject) => visitor.visit(&**subject),)+
                    Self::Encoder(subject) => visitor.visit(&**subject),
                    Self::Gpt2Classifier(subject) => visitor.visit(&**subject),
                }
            }
        }
    };
}

with_language_models!(define_subject);
