// A quantizer in hardware, and a testbench that holds it to mxref.h block by block.
//
//   $ mxref vectors c .
//   $ verilator --binary -Wno-WIDTH --top-module testbench -CFLAGS -I.. mxfp4_quantizer.sv mxref_dpi.c
//   $ obj_dir/Vtestbench

// The design under test: float32 to MXFP4, scale rule RCEIL, ties to even. Inf and NaN make a NaN block.
module mxfp4_quantizer (
    input  logic [31:0][31:0] x,
    output logic [31:0][3:0]  codes,
    output logic [7:0]  scale
);
  logic [30:0] amax;
  always_comb begin
    amax = 0;
    for (int i = 0; i < 32; i++) if (x[i][30:0] > amax) amax = x[i][30:0];
  end

  // One above 2^floor(log2(amax)) / 4 where the mantissa is above that of 6.
  logic signed [9:0] exponent;
  always_comb begin
    exponent = 10'(amax[30:23]) - 10'sd2 + 10'(amax[22:0] > 23'h400000);
    if (amax[30:23] == 8'hff) scale = 8'hff;
    else if (amax == 0 || exponent < 0) scale = 8'h00;
    else scale = exponent[7:0];
  end

  // Magnitude over scale in units of 1/4 with a sticky bit, then the thresholds of E2M1.
  always_comb
    for (int i = 0; i < 32; i++) begin
      logic [23:0] mantissa;
      logic signed [10:0] shift;
      logic [25:0] v;
      logic [2:0] magnitude;
      mantissa = {x[i][30:23] != 0, x[i][22:0]};
      // x = mantissa 2^(e - 150), and v = x 2^(127 - scale) 2^3 with everything below in bit 0
      shift = 11'(scale) + 11'sd20 - 11'((x[i][30:23] == 0) ? 8'd1 : x[i][30:23]);
      if (shift > 25) v = {25'b0, mantissa != 0};
      else begin
        v = 26'(mantissa >> shift);
        v[0] = v[0] | ((mantissa & ((24'd1 << shift) - 24'd1)) != 0);
      end
      if      (v <= 26'd2)  magnitude = 0;  // up to 0.25
      else if (v <  26'd6)  magnitude = 1;  // below 0.75
      else if (v <= 26'd10) magnitude = 2;  // up to 1.25
      else if (v <  26'd14) magnitude = 3;  // below 1.75
      else if (v <= 26'd20) magnitude = 4;  // up to 2.5
      else if (v <  26'd28) magnitude = 5;  // below 3.5
      else if (v <= 26'd40) magnitude = 6;  // up to 5
      else                  magnitude = 7;
      codes[i] = scale == 8'hff ? 4'b0 : {x[i][31], magnitude};
    end
endmodule

module testbench;
  import "DPI-C" function void mxref_mxfp4_block(
      input int unsigned x[32], output byte unsigned codes[32], output byte unsigned scale);

  logic [31:0][31:0] x;
  logic [31:0][3:0] codes;
  logic [7:0] scale;
  mxfp4_quantizer quantizer (.*);

  logic clk = 0;
  always #5 clk = !clk;

  int unsigned words[32];
  byte unsigned wanted[32];
  byte unsigned wanted_scale;
  int unsigned base;
  int block = 0, differ = 0;

  // Eight exponents beside each other, every third block with ties; one block in eight is any bits, NaN and Inf among them.
  always @(negedge clk) begin
    base = $urandom_range(248, 0);
    for (int i = 0; i < 32; i++) begin
      words[i] = $urandom();
      if (block % 8 != 0) words[i] = (words[i] & 32'h807fffff) | ((base + $urandom_range(7, 0)) << 23);
      if (block % 3 == 0) words[i] = words[i] & 32'hffe00000;
      x[i] <= words[i];
    end
  end

  always @(posedge clk) if (block > 0) begin
    mxref_mxfp4_block(words, wanted, wanted_scale);
    for (int i = 0; i < 32; i++)
      if (scale != wanted_scale || codes[i] != wanted[i][3:0]) begin
        differ++;
        if (differ < 5)
          $display("%08x: scale %02x and code %x, must be %02x and %x", x[i], scale, codes[i], wanted_scale, wanted[i][3:0]);
      end
    if (block == 100000) begin
      $display("%0d blocks, %0d elements differ", block, differ);
      $finish;
    end
  end
  always @(posedge clk) block <= block + 1;
endmodule
