//! Tests of language models on the devices of this machine.

mod adapters;
mod ahead;
mod batch;
mod cache;
mod common;
mod compare;
mod constrained;
mod fused;
mod generator;
mod hostile;
mod lora;
mod quantised;
mod recurrent_training;
mod split;
mod stored;
mod stories;
mod story;

mod mutated;
mod selected;
mod speculated;
mod speculated_batch;
