//! `#[derive(Module)]`; see `halcyon_nn::Module`.
#![forbid(unsafe_code)]

use proc_macro2::TokenStream;
use quote::{format_ident, quote, quote_spanned};
use std::collections::HashSet;
use syn::spanned::Spanned;
use syn::{Data, DataEnum, DeriveInput, Error, Field, Fields, LitStr, parse_macro_input, parse_quote};

/// Implements `halcyon_nn::Module` for a struct or an enum whose fields are modules.
///
/// In paths, a field has its own name, and a field of a tuple struct has its number. The name of an enum's
/// variant is not part of a path. Attributes of a field:
///
/// - `#[module(skip)]`: the field holds no parameters, and its type need not be a module.
/// - `#[module(rename = "name")]`: the name used in paths.
/// - `#[module(flatten)]`: the field's own name is left out of the paths of the parameters inside the field.
#[proc_macro_derive(Module, attributes(module))]
pub fn derive_module(input: proc_macro::TokenStream) -> proc_macro::TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    expand(input).unwrap_or_else(Error::into_compile_error).into()
}

/// The attributes of a field.
#[derive(Default)]
struct Role {
    skip: bool,
    flatten: bool,
    rename: Option<LitStr>,
}

fn role(field: &Field) -> syn::Result<Role> {
    let mut role = Role::default();
    for attribute in field.attrs.iter().filter(|a| a.path().is_ident("module")) {
        attribute.parse_nested_meta(|meta| {
            if meta.path.is_ident("skip") {
                role.skip = true;
            } else if meta.path.is_ident("flatten") {
                role.flatten = true;
            } else if meta.path.is_ident("rename") {
                let name: LitStr = meta.value()?.parse()?;
                if name.value().is_empty() {
                    return Err(Error::new(name.span(), "the name is empty; use `flatten` for no name"));
                }
                role.rename = Some(name);
            } else {
                return Err(meta.error("expected `skip`, `flatten` or `rename = \"name\"`"));
            }
            Ok(())
        })?;
        if role.skip && (role.flatten || role.rename.is_some()) || role.flatten && role.rename.is_some() {
            return Err(Error::new(attribute.span(), "`skip`, `flatten` and `rename` exclude each other"));
        }
    }
    Ok(role)
}

/// The calls that visit the fields, and the pattern that binds the fields to names.
fn visits(fields: &Fields, types: &mut Vec<syn::Type>) -> syn::Result<(TokenStream, TokenStream)> {
    let (mut calls, mut bindings, mut names) = (TokenStream::new(), vec![], HashSet::new());
    for (i, field) in fields.iter().enumerate() {
        let role = role(field)?;
        let bound = format_ident!("field_{i}");
        let pattern = match &field.ident {
            Some(name) if role.skip => quote!(#name: _),
            Some(name) => quote!(#name: #bound),
            None if role.skip => quote!(_),
            None => quote!(#bound),
        };
        bindings.push(pattern);
        if role.skip {
            continue;
        }
        types.push(field.ty.clone());
        // The call has the span of the field's type, so that the compiler's error about a type that is not a
        // module points to that type.
        let at = field.ty.span();
        if role.flatten {
            calls.extend(quote_spanned!(at=> ::halcyon_nn::Module::visit(#bound, visit);));
            continue;
        }
        let name = match (&role.rename, &field.ident) {
            (Some(name), _) => name.value(),
            (None, Some(ident)) => ident.to_string().trim_start_matches("r#").to_string(),
            (None, None) => i.to_string(),
        };
        if !names.insert(name.clone()) {
            return Err(Error::new(field.span(), format!("two fields are named `{name}`")));
        }
        calls.extend(quote_spanned!(at=> ::halcyon_nn::Visit::child(visit, #name, #bound);));
    }
    let bindings = match fields {
        Fields::Named(_) => quote!({ #(#bindings),* }),
        Fields::Unnamed(_) => quote!(( #(#bindings),* )),
        Fields::Unit => quote!(),
    };
    Ok((calls, bindings))
}

fn variants(data: &DataEnum, types: &mut Vec<syn::Type>) -> syn::Result<TokenStream> {
    let arms = data.variants.iter().map(|v| {
        let (calls, bindings) = visits(&v.fields, types)?;
        let name = &v.ident;
        Ok(quote!(Self::#name #bindings => { #calls }))
    });
    let arms = arms.collect::<syn::Result<Vec<_>>>()?;
    Ok(quote!(match self { #(#arms)* }))
}

fn expand(input: DeriveInput) -> syn::Result<TokenStream> {
    let mut types = vec![];
    let body = match &input.data {
        Data::Struct(s) => {
            let (calls, bindings) = visits(&s.fields, &mut types)?;
            quote!(let Self #bindings = self; #calls)
        }
        Data::Enum(e) if e.variants.is_empty() => quote!(match *self {}),
        Data::Enum(e) => variants(e, &mut types)?,
        Data::Union(u) => {
            return Err(Error::new(u.union_token.span(), "a union cannot be a module; use an enum"));
        }
    };
    let name = &input.ident;
    let mut generics = input.generics.clone();
    if !generics.params.is_empty() {
        let clause = generics.make_where_clause();
        for ty in &types {
            clause.predicates.push(parse_quote!(#ty: ::halcyon_nn::Module));
        }
    }
    let (imp, ty, clause) = generics.split_for_impl();
    let text = name.to_string();
    Ok(quote! {
        #[automatically_derived]
        impl #imp ::halcyon_nn::Module for #name #ty #clause {
            fn visit(&self, visit: &mut ::halcyon_nn::Visit<'_>) {
                #body
            }
            fn kind(&self) -> &'static str {
                #text
            }
        }
    })
}
