//! What cannot fit, told before it is allocated: an allocation that fails ends the process without a
//! word about the key that asked for it.

use std::fs;

use deepburn_config::BatchPlan;
use deepburn_models::gpt2::ParameterShape;

use crate::failure::Failure;

/// Bytes of an fp32 parameter.
const FP32: u64 = 4;

/// Tokens of one optimizer step on one rank: more cannot be numbered in 32 bits.
const MAX_TOKENS: usize = 1 << 31;

/// Refuses models of which not even the parameters fit, which every job builds once. `sizes` are the
/// fields that decide.
pub(crate) fn check_model(parameters: &[ParameterShape], sizes: &str) -> Result<(), Failure> {
    let numel = |shape: &[usize]| shape.iter().fold(1_u64, |n, it| n.saturating_mul(*it as u64));
    let numels = parameters.iter().map(|parameter| numel(&parameter.shape));
    let bytes = numels.fold(0, u64::saturating_add).saturating_mul(FP32);
    let Some(memory) = machine_memory().filter(|memory| bytes > *memory) else {
        return Ok(());
    };
    Err(Failure::mistake(format!(
        "model.config: the parameters alone take {} GiB, this machine has {} GiB of memory; lower \
         {sizes}",
        bytes >> 30,
        memory >> 30
    )))
}

/// Refuses optimizer steps of more tokens on a rank than can be numbered.
pub(crate) fn check_step(batch: BatchPlan, sequence_length: usize) -> Result<(), Failure> {
    let BatchPlan { micro_batch_size, gradient_accumulation_steps, .. } = batch;
    let samples = micro_batch_size.saturating_mul(gradient_accumulation_steps);
    if samples.saturating_mul(sequence_length) <= MAX_TOKENS {
        return Ok(());
    }
    Err(Failure::mistake(format!(
        "deepspeed.train_micro_batch_size_per_gpu: {micro_batch_size} sequences of \
         {sequence_length} tokens, {gradient_accumulation_steps} times a step \
         (gradient_accumulation_steps), are more than the {MAX_TOKENS} tokens that a rank can take \
         in one step; lower one of them"
    )))
}

/// Memory and swap of this machine in bytes, where the system tells.
fn machine_memory() -> Option<u64> {
    let info = fs::read_to_string("/proc/meminfo").ok()?;
    Some(
        kibibytes(&info, "MemTotal")?.saturating_add(kibibytes(&info, "SwapTotal").unwrap_or(0))
            << 10,
    )
}

/// A number of Linux's `/proc/meminfo`.
fn kibibytes(info: &str, name: &str) -> Option<u64> {
    let line = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().strip_suffix(" kB")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use deepburn_models::gpt2::Gpt2Config;

    fn batch(micro_batch_size: usize, gradient_accumulation_steps: usize) -> BatchPlan {
        BatchPlan {
            train_batch_size: 1,
            micro_batch_size,
            gradient_accumulation_steps,
            world_size: 1,
        }
    }

    #[test]
    fn models_beyond_the_machine_are_refused() {
        assert!(check_model(&Gpt2Config::small().parameters(), "n_embd").is_ok());
        let huge = Gpt2Config { n_embd: 1 << 24, n_head: 1, ..Gpt2Config::small() };
        let message = check_model(&huge.parameters(), "n_embd").unwrap_err().to_string();
        assert!(message.contains("n_embd"), "{message}");
    }

    #[test]
    fn steps_have_a_limit() {
        assert!(check_step(batch(1 << 20, 2), 1024).is_ok());
        for (micro, steps) in [(1 << 20, 3), (usize::MAX, 1), (1, usize::MAX), (1 << 60, 1 << 60)] {
            assert!(check_step(batch(micro, steps), 1024).is_err(), "{micro} x {steps}");
        }
    }

    #[test]
    fn numbers_of_the_system_are_read() {
        let info = "MemTotal:       16384 kB\nMemFree: 1 kB\nSwapTotal: 0 kB\n";
        assert_eq!(kibibytes(info, "MemTotal"), Some(16384));
        assert_eq!(kibibytes(info, "SwapTotal"), Some(0));
        assert_eq!(kibibytes(info, "Mem"), None);
        assert_eq!(kibibytes("MemTotal: much", "MemTotal"), None);
    }
}
