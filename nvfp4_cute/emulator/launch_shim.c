/* placeholder until the shim lands */
int nvfp4_cute_shim_version(void) { return 0; }
