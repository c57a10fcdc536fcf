-- needs: session keys
-- ARGV: key, whether there is an answer, answer, now, most bytes of keys, lifetime of keys
if redis.call('EXISTS', base) == 0 then
    return 0
end
local all = open_keys(ARGV[5], ARGV[6])
return finish_key(all, ARGV[1], ARGV[2] == '1', ARGV[3], tonumber(ARGV[4])) and 1 or 0
