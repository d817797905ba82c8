"""Arrays anywhere (Zarr, .npy, xarray): how they are opened, and cut into samples.

Only what `array()` imports when it is called loads zarr or xarray. The order, the windows and the
decoding ahead are those of `data.tables`; nothing here knows of ranks.
"""
