//! Names the shared library inside the file, so that programs that were linked with it find it by this name.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    match std::env::var("CARGO_CFG_TARGET_OS").as_deref() {
        Ok("macos") => println!("cargo::rustc-cdylib-link-arg=-Wl,-install_name,@rpath/libhalcyon.dylib"),
        Ok("windows") | Err(_) => {}
        Ok(_) => {
            println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libhalcyon.so");
            // Threads of the library may run when a program unloads it.
            println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
        }
    }
}
