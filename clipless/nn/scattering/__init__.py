"""The scattering transform as a layer, and its wavelets."""
