//! The random number stream of one rank.
//!
//! Backends use one generator per device. Rank threads would share it, and the random numbers of a
//! rank would depend on the timing of the other ranks. Each rank therefore has its own stream,
//! which is determined by the seed, the model and the rank. Checkpoints store its position. The
//! numbers are the same at every ZeRO stage, because they depend only on the sequence of random
//! ops.

use burn_backend::{Distribution, Element, Shape, TensorData};
use deepburn_kernels::ChaChaPosition;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

/// The random stream of one rank.
#[derive(Debug, Clone)]
pub struct RandomStream {
    /// The seed that all ranks share.
    seed: u64,
    /// The index of the model among the models of the rank.
    model: u32,
    /// The rank.
    rank: usize,
    /// The generator, which can seek to any position in constant time.
    generator: ChaCha8Rng,
}

impl RandomStream {
    /// Returns the stream of `rank` for a seed. `model` is the index of the model among the models
    /// of the rank, counted from 0. With the same seed, two models draw different random numbers.
    pub fn new(seed: u64, model: u32, rank: usize) -> Self {
        let mut generator = ChaCha8Rng::seed_from_u64(seed);
        // Each model and rank has a different ChaCha stream, so streams never overlap, whatever the
        // seed.
        generator.set_stream(u64::from(model) << 32 | (rank as u64 + 1));
        Self { seed, model, rank, generator }
    }

    /// Restarts the stream with another seed.
    pub fn reseed(&mut self, seed: u64) {
        *self = Self::new(seed, self.model, self.rank);
    }

    /// Returns the index of the model that uses the stream.
    pub fn model(&self) -> u32 {
        self.model
    }

    /// Returns the seed that all ranks share.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Returns the number of 32-bit words drawn so far.
    pub fn position(&self) -> u128 {
        self.generator.get_word_pos()
    }

    /// Returns where the stream is, for a device that draws from it. The caller then skips the
    /// words that were drawn there.
    pub(crate) fn on_device(&self) -> ChaChaPosition {
        let (key, stream) = (self.generator.get_seed(), self.generator.get_stream());
        ChaChaPosition { key, stream, word: self.position() }
    }

    /// Moves to the position after `position` 32-bit words.
    pub fn seek(&mut self, position: u128) {
        self.generator.set_word_pos(position);
    }

    /// Draws the elements of an array of `shape` in row-major order.
    pub(crate) fn draw<E: Element>(
        &mut self,
        shape: Shape,
        distribution: Distribution,
    ) -> TensorData {
        TensorData::random::<E, _, _>(shape, distribution, &mut self.generator)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(stream: &mut RandomStream) -> Vec<f32> {
        let data = stream.draw::<f32>(Shape::from(vec![5]), Distribution::Default);
        data.to_vec().unwrap()
    }

    #[test]
    fn ranks_and_models_differ_and_positions_resume() {
        let mut stream = RandomStream::new(7, 0, 0);
        let first = draw(&mut stream);
        assert_ne!(first, draw(&mut RandomStream::new(7, 0, 1)));
        assert_ne!(first, draw(&mut RandomStream::new(8, 0, 0)));
        assert_ne!(first, draw(&mut RandomStream::new(7, 1, 0)));
        assert_eq!(first, draw(&mut RandomStream::new(7, 0, 0)));

        let position = stream.position();
        let second = draw(&mut stream);
        let mut resumed = RandomStream::new(7, 0, 0);
        resumed.seek(position);
        assert_eq!(second, draw(&mut resumed));
    }
}
