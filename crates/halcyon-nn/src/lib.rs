//! Modules, losses, optimizers and training steps. Layers, losses and optimizers have PyTorch's names,
//! defaults and weight layouts.
//!
//! A model is a struct with `#[derive(Module)]`; its forward is an ordinary function of tensors. An
//! [`Optimizer`] updates the parameters: either by separate calls of [`loss_and_grads`] and
//! [`Optimizer::step`], or with [`TrainStep`], which makes one plan of the whole training step.
//!
//! ```
//! use halcyon::prelude::*;
//! use halcyon_nn::{Adam, CrossEntropyOptions, Linear, Module, Optimizer, TrainStep, cross_entropy};
//!
//! #[derive(Module)]
//! struct Net {
//!     fc1: Linear,
//!     fc2: Linear,
//! }
//!
//! impl Net {
//!     fn forward(&self, x: &Tensor) -> Tensor {
//!         self.fc2.forward(&self.fc1.forward(x).relu())
//!     }
//! }
//!
//! # fn main() -> halcyon::Result<()> {
//! let b = Backend::cpu()?;
//! let net = Net { fc1: Linear::new(&b, 2, 16)?, fc2: Linear::new(&b, 16, 2)? };
//! let x = Tensor::from_slice(&b, [4, 2], &[0.0f32, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0])?;
//! let y = Tensor::from_slice(&b, [4], &[0i32, 1, 1, 0])?;
//! let optimizer = Optimizer::new(&net, Adam::w().rate(0.05))?;
//! let mut step = TrainStep::new(&net, optimizer, |net: &&Net, batch: &[Tensor]| {
//!     Ok(vec![cross_entropy(&net.forward(&batch[0]), &batch[1], CrossEntropyOptions::default())])
//! })?;
//! for _ in 0..200 {
//!     step.run(&[&x, &y])?;
//! }
//! let answers = net.forward(&x).argmax(1).to_vec::<i64>()?;
//! assert_eq!(answers, [0, 1, 1, 0]);
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

// The derive macro refers to this crate as `halcyon_nn`, also in this crate's own tests.
extern crate self as halcyon_nn;

mod checkpoint;
mod ema;
mod grad;
pub mod init;
pub mod layers;
pub mod loss;
mod module;
pub mod optim;
pub mod prepare;
mod scaler;
mod scope;
mod slot;
mod step;
mod weights;

pub use checkpoint::{checkpoint, checkpoint_many};
pub use ema::Ema;
pub use grad::{ModuleGrads, loss_and_grads};
pub use halcyon_derive::Module;
pub use init::{Fan, Init};
pub use layers::*;
pub use loss::*;
pub use module::{Module, ModuleExt, Pattern, Unmatched, Visit};
pub use optim::*;
pub use prepare::{Inference, Prepared, TrainingOptimizer};
pub use scaler::LossScaler;
pub use scope::{evaluation, is_training, training, uniform};
pub use slot::{Buffer, Param, Slot, SlotId, SlotKind};
pub use step::{MemoryBudget, StepGraph, TrainStep};
pub use weights::{LoadWeights, Strictness};
