//! Epilogues of f32 products: bias and ReLU, which kernels apply while they store the result.

use halcyon::ir::{Graph, TensorType};
use halcyon::prelude::*;
use halcyon::{ConstData, Session};
use halcyon_test::Rng;
use halcyon_test::devices::test_backends;

/// How the bias is added.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Bias {
    None,
    /// One value per column: elements `1..` of a vector that is one longer.
    Columns,
    /// One value per row. No micro-kernel of the CPU adds such a bias.
    Rows,
}

/// `relu(x @ w + bias)`. If `packed`, the weights are a constant of the graph.
fn layer(x: &ConstData, w: &ConstData, bias: (Bias, &ConstData), relu: bool, packed: bool) -> Graph {
    let mut g = Graph::new();
    let input =
        |g: &mut Graph, name: &str, d: &ConstData| g.input(name, TensorType::new(DType::F32, &d.dims[..]));
    let a = input(&mut g, "x", x);
    let b = if packed { g.constant(w.clone()) } else { input(&mut g, "w", w) };
    let c = input(&mut g, "bias", bias.1);
    let mut y = g.matmul(a, b).unwrap();
    let n = bias.1.dims[0];
    y = match bias.0 {
        Bias::None => y,
        Bias::Columns => {
            let c = g.narrow(c, 0, 1usize, n - 1).unwrap();
            g.add(y, c).unwrap()
        }
        Bias::Rows => {
            let c = g.reshape(c, [n, 1]).unwrap();
            g.add(c, y).unwrap()
        }
    };
    if relu {
        y = g.relu(y).unwrap();
    }
    g.output("y", y);
    g
}

/// Few rows, few columns, panels, a single element, rows of a batch, and an empty sum.
const SHAPES: [(&[usize], usize, usize); 9] = [
    (&[1], 40, 70),
    (&[5], 33, 129),
    (&[70], 40, 1),
    (&[64], 48, 3),
    (&[65], 300, 47),
    (&[1], 7, 1),
    (&[3, 21], 17, 35),
    (&[2, 3, 4], 9, 16),
    (&[6], 0, 5),
];

#[test]
fn bias_and_relu_of_products_of_every_form() {
    let mut rng = Rng::fresh("bias_and_relu_of_products_of_every_form");
    for kind in test_backends() {
        let b = Backend::builder().backend_type(kind).num_threads(2).build().unwrap();
        for (rows, k, n) in SHAPES {
            let m: usize = rows.iter().product();
            let mut x = rng.f32s(m * k);
            if let Some(first) = x.first_mut() {
                *first = f32::NAN;
            }
            let w = rng.f32s(k * n);
            for (bias, relu, packed) in [
                (Bias::None, true, false),
                (Bias::Columns, true, true),
                (Bias::Columns, false, false),
                (Bias::Rows, true, false),
            ] {
                let last = *rows.last().unwrap();
                let values = rng.f32s(if bias == Bias::Rows { last } else { n + 1 });
                let dims = [rows, &[k]].concat();
                let data = [
                    ConstData::from_slice(&dims, &x).unwrap(),
                    ConstData::from_slice(&[k, n], &w).unwrap(),
                    ConstData::from_slice(&[values.len()], &values).unwrap(),
                ];
                let g = layer(&data[0], &data[1], (bias, &data[2]), relu, packed);
                let given: Vec<_> =
                    if packed { vec![data[0].clone(), data[2].clone()] } else { data.to_vec() };
                let got = Session::new(&b, g).run(&given).unwrap()[0].to_vec::<f32>();
                for i in 0..m {
                    for j in 0..n {
                        let products = (0..k).map(|q| f64::from(x[i * k + q]) * f64::from(w[q * n + j]));
                        let add = match bias {
                            Bias::None => 0.0,
                            Bias::Columns => values[1 + j],
                            Bias::Rows => values[i % last],
                        };
                        let v = products.sum::<f64>() + f64::from(add);
                        let want = if relu && v < 0.0 { 0.0 } else { v };
                        let y = f64::from(got[i * n + j]);
                        let same = if want.is_nan() { y.is_nan() } else { (y - want).abs() < 1e-3 };
                        assert!(same, "{kind} {dims:?} {n} {bias:?} {relu} {packed}: [{i}, {j}] {y} {want}");
                    }
                }
            }
        }
    }
}
