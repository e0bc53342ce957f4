"""INT8 products on sm_100a and sm_110a with fp32 scales of rows."""
