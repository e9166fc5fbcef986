//! Acceptance tests for models written the way Burn users write them.
//!
//! The code of the models does not depend on ranks, sharding or precision: models are generic over
//! their backend, consist of `burn::nn` layers, and take f32 inputs. For every model, the tests
//! check that all stages give the same bits, that a pipeline does too, that fp32 agrees with plain
//! Burn, that 16-bit training is close to fp32, and that resuming is exact.
#![recursion_limit = "256"]

mod cnn;
mod convolutions;
mod distillation;
mod gan;
mod hand_cast;
mod harness;
mod lora;
mod operations;
mod parameter_kinds;
mod pipelines;
mod properties;
mod recurrent;
mod samples;
mod transformer;
mod weights;

/// Tests every property of a model in every precision.
macro_rules! test_model {
    ($name:ident, $model:ident) => {
        mod $name {
            use super::$model;
            use crate::harness::Precision::{Bf16, Fp16, Fp32};
            use crate::harness::{Trained, WithoutData};
            use crate::{pipelines, properties};

            #[test]
            fn fp32_is_plain_burn() {
                properties::fp32_is_plain_burn::<$model<Trained>>();
            }

            #[test]
            fn bf16_stays_near_fp32() {
                properties::stays_near_fp32::<$model<Trained>>(Bf16);
            }

            #[test]
            fn fp16_stays_near_fp32() {
                properties::stays_near_fp32::<$model<Trained>>(Fp16);
            }

            #[test]
            fn stages_agree_in_fp32() {
                properties::stages_agree::<$model<Trained>>(Fp32);
            }

            #[test]
            fn stages_agree_in_bf16() {
                properties::stages_agree::<$model<Trained>>(Bf16);
            }

            #[test]
            fn stages_agree_in_fp16() {
                properties::stages_agree::<$model<Trained>>(Fp16);
            }

            #[test]
            fn recomputation_changes_nothing_in_fp32() {
                properties::recomputation_changes_nothing::<$model<Trained>>(Fp32);
            }

            #[test]
            fn recomputation_changes_nothing_in_bf16() {
                properties::recomputation_changes_nothing::<$model<Trained>>(Bf16);
            }

            #[test]
            fn recomputation_changes_nothing_in_fp16() {
                properties::recomputation_changes_nothing::<$model<Trained>>(Fp16);
            }

            #[test]
            fn a_forecast_is_the_run_in_fp32() {
                properties::a_forecast_is_the_run::<$model<Trained>, $model<WithoutData>>(Fp32);
            }

            #[test]
            fn a_forecast_is_the_run_in_bf16() {
                properties::a_forecast_is_the_run::<$model<Trained>, $model<WithoutData>>(Bf16);
            }

            #[test]
            fn pipelines_agree_in_fp32() {
                pipelines::pipelines_agree::<$model<Trained>, $model<WithoutData>>(Fp32);
            }

            #[test]
            fn pipelines_agree_in_bf16() {
                pipelines::pipelines_agree::<$model<Trained>, $model<WithoutData>>(Bf16);
            }

            #[test]
            fn resumes_in_fp32() {
                properties::resumes::<$model<Trained>>(Fp32);
            }

            #[test]
            fn resumes_in_bf16() {
                properties::resumes::<$model<Trained>>(Bf16);
            }

            #[test]
            fn resumes_in_fp16() {
                properties::resumes::<$model<Trained>>(Fp16);
            }
        }
    };
}
use test_model;
