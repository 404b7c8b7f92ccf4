//! Compares the kernels of the templates with the float64 reference. The kernels run in the interpreter with
//! its sanitizer, at four subgroup sizes, in shuffled orders, for a GPU, a CPU and a device with tiny
//! workgroups.

mod attention;
mod cached_attention;
mod conv;
mod harness;
mod linear;
mod linear_matrix;
mod matmul;
mod norm;
mod pool;
mod softmax;
