//! Merged launches: the step of an optimizer is one launch over all parameters.

use crate::alone;
use halcyon::State;
use halcyon::prelude::*;
use halcyon_test::Rng;

/// An optimizer's update. `x` has all gradients, then all parameters, then the two moments in the same way.
fn adam(x: &[Tensor]) -> Vec<Tensor> {
    let n = x.len() / 4;
    let (mut params, mut moments) = (vec![], vec![]);
    for i in 0..n {
        let (g, p, m, v) = (&x[i], &x[n + i], &x[2 * n + i], &x[3 * n + i]);
        let m = m + (g - m) * 0.1;
        let v = v * 0.9 + g.sqr() * 0.1;
        params.push(p - &m / (v.sqrt() + 1e-3) * Tensor::argument(g.backend(), 0, DType::F32));
        moments.push([m, v]);
    }
    let of = |k: usize| moments.iter().map(move |m| m[k].clone());
    params.into_iter().chain(of(0)).chain(of(1)).collect()
}

#[test]
fn one_launch_updates_all_parameters() {
    // Sizes are from 1 to about 20,000. The last case has more parameters than fit the arguments of one
    // launch.
    let mut rng = Rng::fresh("one_launch_updates_all_parameters");
    for (kind, many) in [(BackendType::Cuda, 8), (BackendType::Rocm, 8), (BackendType::Cuda, 90)] {
        let Some((_s, _alone)) = alone(kind) else { return };
        let sizes: Vec<usize> = (0..many).map(|k| [1, 10, 64, 513, 4096, 20_003][k % 6] + k / 6).collect();
        let data: Vec<Vec<f32>> = (0..4 * many)
            .map(|k| {
                rng.f32s(sizes[k % many]).iter().map(|v| if k < 3 * many { *v } else { v.abs() }).collect()
            })
            .collect();
        let run = |kind: BackendType, level: Level| {
            let b = Backend::builder().backend_type(kind).level(level).build().unwrap();
            let all: Vec<Tensor> =
                data.iter().map(|v| Tensor::from_slice(&b, [v.len()], v).unwrap()).collect();
            let states: Vec<State> = all[many..].iter().cloned().map(State::new).collect();
            let f = b.compile(adam as fn(&[Tensor]) -> Vec<Tensor>);
            let mut launches = 0;
            for _ in 0..3 {
                let before = b.counters();
                let grads: Vec<&Tensor> = all[..many].iter().collect();
                f.call_updating(&grads, &states.iter().collect::<Vec<_>>(), &[0.01.into()]).unwrap();
                launches = b.counters().launches - before.launches;
            }
            let values: Vec<Vec<f32>> = states.iter().map(|s| s.value().to_vec().unwrap()).collect();
            (launches, values)
        };
        let (launches, got) = run(kind, Level::O2);
        let (_, want) = run(BackendType::Cpu, Level::O0);
        for (g, w) in got.iter().flatten().zip(want.iter().flatten()) {
            assert!((g - w).abs() <= 1e-5 * w.abs().max(1.0), "{kind}: {g}, {w}");
        }
        // 4 KiB of arguments are enough for about 50 parameters.
        assert!(if many == 8 { launches == 1 } else { launches == 2 }, "{kind}: {launches} launches");
    }
}
